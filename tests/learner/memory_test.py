"""Memory of an update by the compiler's own account; nothing is allocated."""

from __future__ import annotations

from benchmarks import compiled
from hgpo_jax.models import configs
from hgpo_jax.planning import workload


def test_half_a_billion_parameters_need_4_gb_for_32_rows_of_320():
  """With every position scored. All logits at once are 6.2 GB, many times."""
  work = workload.Workload(
      model=configs.CONFIGS['0.5b'],
      mesh=(1, 1, 1),
      compute_dtype='float32',
      keep_attention=False,
      rows=32,
      length=320,
      response=320,
      logits_tokens=1024,
  )
  assert compiled.gradient_alone_bytes(work) < 4e9
