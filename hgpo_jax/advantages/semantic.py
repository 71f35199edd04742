"""When two states mean the same: classes of states by their texts.

Only unique texts are read, never rows. Classes are made a task group at a
time, and only their equality within a group means something.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
import functools
import math
import re
import unicodedata
import zlib

import numpy as np

from hgpo_jax.advantages import grouping

MERGING = ('hash', 'difflib', 'embed')  # Similar texts, by a threshold.
KINDS = ('none', 'norm', *MERGING)
Embed = Callable[[Sequence[str]], np.ndarray]
HASH_SIZE = 4096

_COUNTER = re.compile(
    r'[\[(]?\bstep\s*[:#]?\s*\d+(?:\s*(?:of|/)\s*\d+)?\b[\])]?\s*[:.,]?'
)
_LISTED = re.compile(r'\b(you see )([^.:;!?]*)')
_BETWEEN_ITEMS = re.compile(r',\s*(?:and\s+)?|\s+and\s+')
_TRAILING = ' .,;:!?…'
_WORD = re.compile(r"[\w']+")
# A token with a digit, and the word before it: 'drawer 1', 'b0012'.
_ENTITY = re.compile(r'(?:[^\W\d_]+ )?\w*\d\w*')
_NEGATIONS = frozenset(
    'no not nothing none never neither nor nobody cannot without'.split()
)


def classes(
    kind: str,
    threshold: float,
    group_U: np.ndarray,
    state_U: np.ndarray,
    texts: Sequence[str],
    embed: Embed | None = None,
) -> np.ndarray:
  """Class id of each step's state.

  'none': the state itself. 'norm': states of one `canonical` text. 'hash',
  'difflib' and 'embed' then merge similar texts: those of a group are visited by falling
  number of steps, ties by text, and each joins the first class whose opening
  text is similar, or opens one. Texts merge only if they name the same
  numbered things and the same negations: 'drawer 1' is never 'drawer 2'.

  Args:
    kind: one of `KINDS`.
    threshold: smallest similarity to merge: the cosine of the hashed counts
      of words and word pairs, `SequenceMatcher.ratio()`, or the cosine of
      the texts' vectors.
    group_U: group of each distinct step.
    state_U: state ids, indices into `texts`.
    texts: text of each state id; not read for 'none'.
    embed: [texts, D] vectors of texts, for 'embed'.

  Raises:
    ValueError: a state without a text, or no way to embed texts.
  """
  if kind == 'none':
    return state_U
  _check_texts(state_U, texts)
  used, state_U = np.unique(state_U, return_inverse=True)
  ids: dict[str, int] = {}
  class_S = np.array(
      [ids.setdefault(canonical(texts[state]), len(ids)) for state in used],
      int,
  )
  class_U = class_S[state_U]
  if kind == 'norm':
    return class_U
  return _merge(kind, threshold, group_U, class_U, tuple(ids), embed)


@functools.lru_cache(maxsize=1 << 15)  # Texts recur from update to update.
def canonical(text: str) -> str:
  """The text without what does not change its meaning.

  NFKC, lower case, single spaces, no step counters, the things after 'you
  see' in alphabetical order, no trailing punctuation.
  """
  text = unicodedata.normalize('NFKC', text).lower()
  text = ' '.join(_COUNTER.sub(' ', text).split())
  return _LISTED.sub(_sort_items, text).rstrip(_TRAILING)


def guard(text: str) -> tuple[frozenset[str], frozenset[str]]:
  """What has to be equal for texts to merge: numbered things, negations."""
  negations = frozenset(
      word
      for word in _WORD.findall(text)
      if word in _NEGATIONS or word.endswith("n't")
  )
  return frozenset(_ENTITY.findall(text)), negations


def _sort_items(match: re.Match[str]) -> str:
  items = _BETWEEN_ITEMS.split(match[2].strip())
  return match[1] + ', '.join(sorted(item for item in items if item))


def _check_texts(state_U: np.ndarray, texts: Sequence[str]) -> None:
  highest = int(state_U.max(initial=-1))
  if len(texts) <= highest:
    raise ValueError(
        f'got {len(texts)} state texts for state ids up to {highest}, expected'
        " one text a state: fill `state_texts`, or set ProGPO.classes = 'none'"
    )


def _merge(
    kind: str,
    threshold: float,
    group_U: np.ndarray,
    class_U: np.ndarray,
    texts: tuple[str, ...],
    embed: Embed | None,
) -> np.ndarray:
  """Merges similar texts among the (group, class) pairs that occur."""
  pair_U = grouping.pair_ids(group_U, class_U)
  _, step_P, visits_P = np.unique(pair_U, return_index=True, return_counts=True)
  class_P = class_U[step_P]
  guards: dict[object, int] = {}
  guard_S = np.array(
      [guards.setdefault(guard(text), len(guards)) for text in texts], int
  )
  bucket_P = grouping.pair_ids(group_U[step_P], guard_S[class_P])
  visit_P = sorted(
      range(len(class_P)), key=lambda p: (-visits_P[p], texts[class_P[p]])
  )
  if kind == 'difflib':
    merged_P = grouping.similar_states(
        bucket_P, class_P, visit_P, texts, threshold
    )
  else:
    cosine = _hash_cosine(texts) if kind == 'hash' else _cosine(texts, embed)
    merged_P = _similar(bucket_P, class_P, visit_P, cosine, threshold)
  return merged_P[pair_U]


def _similar(
    bucket_P: np.ndarray,
    class_P: np.ndarray,
    visit_P: Sequence[int],
    cosine: Callable[[int, int], float],
    threshold: float,
) -> np.ndarray:
  """`grouping.similar_states` by the cosine of two classes."""
  leaders: dict[int, list[int]] = collections.defaultdict(list)
  joined_P = class_P.copy()
  for p in visit_P:
    own = int(class_P[p])
    for leader in leaders[int(bucket_P[p])]:
      if cosine(own, leader) >= threshold:
        joined_P[p] = leader
        break
    else:
      leaders[int(bucket_P[p])].append(own)
  return joined_P


def _cosine(
    texts: tuple[str, ...], embed: Embed | None
) -> Callable[[int, int], float]:
  """Of the vectors of two texts; a vector of 0 is like no other."""
  if embed is None:
    raise ValueError(
        "ProGPO.classes is 'embed', but embed_texts of the inputs is None:"
        " expected the policy's embeddings, which training gives; without a"
        " policy set ProGPO.classes = 'hash'"
    )
  vector_SD = np.asarray(embed(texts), np.float64)
  length_S = np.sqrt((vector_SD**2).sum(1))
  vector_SD = vector_SD / np.where(length_S > 0.0, length_S, 1.0)[:, None]
  return lambda one, other: float((vector_SD[one] * vector_SD[other]).sum())


def _hash_cosine(texts: tuple[str, ...]) -> Callable[[int, int], float]:
  """Of the hashed counts of two texts."""
  vectors = [_hashed(text) for text in texts]

  def cosine(one: int, other: int) -> float:
    others = vectors[other]
    return sum(x * others.get(slot, 0.0) for slot, x in vectors[one].items())

  return cosine


def _hashed(text: str) -> dict[int, float]:
  """Counts of words and of word pairs in hashed slots, of length 1."""
  words = _WORD.findall(text)
  grams = [*words, *map(' '.join, zip(words, words[1:]))]
  counts = collections.Counter(
      zlib.crc32(gram.encode()) % HASH_SIZE for gram in grams
  )
  length = math.sqrt(sum(n * n for n in counts.values()))
  return {slot: n / length for slot, n in counts.items()}
