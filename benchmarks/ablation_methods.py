"""What the ablation compares: estimators by name, or gin files of one's own."""

from __future__ import annotations

from collections.abc import Sequence
import dataclasses
import pathlib


@dataclasses.dataclass(frozen=True)
class Method:
  """What is compared.

  Attributes:
    name: of the folder of its runs.
    label: in the table.
    gin_file: that of the estimator.
    state_key: how a state is known again; None leaves it to the gin file.
  """

  name: str
  label: str
  gin_file: str
  state_key: str | None = 'observation'


_MAIN = (
    Method('grpo', 'GRPO', 'algorithms/grpo.gin'),
    Method('gigpo', 'GiGPO', 'algorithms/gigpo.gin'),
    Method('hgpo', 'HGPO', 'algorithms/hgpo.gin'),
    Method('g2po', 'G2PO', 'algorithms/g2po.gin', 'admissible'),
    Method('graphgpo', 'GraphGPO', 'algorithms/graphgpo.gin', 'inventory'),
    Method('progpo', 'ProGPO', 'algorithms/progpo.gin'),
    Method('covgpo_grpo', 'CovGPO over GRPO', 'algorithms/covgpo_grpo.gin'),
    Method('covgpo_hgpo', 'CovGPO over HGPO', 'algorithms/covgpo_hgpo.gin'),
)
# Trained if named. The two that know a state by more than its text as
# published, without that.
_OBSERVED = (
    Method(
        'g2po_observed', 'G2PO, states as observations', 'algorithms/g2po.gin'
    ),
    Method(
        'graphgpo_observed',
        'GraphGPO, states as observations',
        'algorithms/graphgpo.gin',
    ),
)
# CovGPO over the rest, with the states of the base.
_COVERED = (
    Method('covgpo_gigpo', 'CovGPO over GiGPO', 'algorithms/covgpo_gigpo.gin'),
    Method(
        'covgpo_g2po',
        'CovGPO over G2PO',
        'algorithms/covgpo_g2po.gin',
        'admissible',
    ),
    Method(
        'covgpo_graphgpo',
        'CovGPO over GraphGPO',
        'algorithms/covgpo_graphgpo.gin',
        'inventory',
    ),
    Method(
        'covgpo_progpo', 'CovGPO over ProGPO', 'algorithms/covgpo_progpo.gin'
    ),
)
METHODS = {method.name: method for method in _MAIN + _OBSERVED + _COVERED}
MAIN = [method.name for method in _MAIN]
BASELINE = METHODS['grpo']


def find(names: Sequence[str]) -> list[Method]:
  """The methods of these names, or of these gin files.

  Raises:
    ValueError: none, an unknown name, or two whose runs would share a folder
      or a row.
  """
  found = [_method(name) for name in names]
  if not found:
    raise ValueError(f'--methods= is empty; try {",".join(MAIN)}')
  by_folder = dict(METHODS)
  by_label = {method.label: method for method in METHODS.values()}
  for method in found:
    # Some file systems take no notice of case.
    other = by_folder.setdefault(method.name.lower(), method)
    same_row = by_label.setdefault(method.label, method)
    for rival, place in (
        (other, f'folder {other.name}'),
        (same_row, f'row {method.label!r} of the table'),
    ):
      if rival != method:
        raise ValueError(
            f'--methods={",".join(names)}: runs of {method.gin_file} and of'
            f' {rival.gin_file} would share the {place}; rename one of the'
            ' files'
        )
  return list(dict.fromkeys(found))


def _method(name: str) -> Method:
  if name in METHODS:
    return METHODS[name]
  for method in METHODS.values():
    if name == method.gin_file:
      return method
  stem = pathlib.Path(name).stem
  # Its runs lie in a folder of that name: '..gin' would be all folders.
  if not name.endswith('.gin') or stem.startswith('.'):
    raise ValueError(
        f'--methods: {name!r} is unknown; expected some of'
        f' {", ".join(METHODS)}, or gin files of your own (<name>.gin)'
    )
  return Method(stem, stem, name, state_key=None)
