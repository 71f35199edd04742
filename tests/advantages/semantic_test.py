"""Classes of states by their texts."""

from __future__ import annotations

import numpy as np
import pytest

from hgpo_jax.advantages import semantic


@pytest.mark.parametrize(
    'first, second',
    [
        ('You are in a Room.', 'you  are in a\nroom'),
        (
            'On the desk 1, you see a pen 2, a book 1, and a mug 3.',
            'On the desk 1, you see a book 1, a mug 3, and a pen 2.',
        ),
        ('You see a cup 1 and a pan 2', 'You see a pan 2, and a cup 1.'),
        ('[Step 3 of 50] You wait.', 'Step 17/50: you wait'),
        ('ﬁre', 'fire'),  # A ligature.
    ],
)
def test_texts_of_one_canonical_form(first, second):
  assert semantic.canonical(first) == semantic.canonical(second)


@pytest.mark.parametrize(
    'first, second',
    [
        ('You open the drawer 1.', 'You open the drawer 2.'),
        ('You see a cup 1.', 'You see a cup 1 and a cup 2.'),
        ('The drawer is open.', 'The drawer is not open.'),
    ],
)
def test_texts_of_different_canonical_forms(first, second):
  assert semantic.canonical(first) != semantic.canonical(second)
  assert semantic.guard(first.lower()) != semantic.guard(second.lower())


LONG = 'you walk along the very long corridor to the kitchen and look at the '
LONG += 'table where the red mug 1 and the blue bowl 2 stand in the bright '
LONG += 'light of the lamp which hangs over the stove and the old oak shelf'
TEXTS = (
    LONG,
    LONG + '!',  # The same canonical text.
    LONG + ' today',  # Similar.
    LONG.replace('mug 1', 'mug 3'),  # Another mug.
    LONG.replace('stand', 'never stand'),  # Says the opposite.
    'you are somewhere else',
)


def _embed(texts):
  """Counts of letters, which stand for tokens."""
  letters = 'abcdefghijklmnopqrstuvwxyz0123456789'
  return np.array([[float(text.count(c)) for c in letters] for text in texts])


def _classes(kind, groups=None, states=None, texts=TEXTS, threshold=0.95):
  states = np.arange(len(texts)) if states is None else np.array(states)
  groups = np.zeros(len(states), int) if groups is None else np.array(groups)
  found = semantic.classes(kind, threshold, groups, states, texts, _embed)
  return [np.flatnonzero(found == found[i])[0] for i in range(len(found))]


def test_each_kind():
  assert _classes('none') == [0, 1, 2, 3, 4, 5]
  assert _classes('norm') == [0, 0, 2, 3, 4, 5]
  assert _classes('hash') == [0, 0, 0, 3, 4, 5]
  assert _classes('difflib') == [0, 0, 0, 3, 4, 5]
  assert _classes('embed') == [0, 0, 0, 3, 4, 5]


@pytest.mark.parametrize('kind', ['hash', 'difflib', 'embed'])
def test_a_high_threshold_merges_only_equal_texts(kind):
  assert _classes(kind, threshold=1.0 - 1e-9) == [0, 0, 2, 3, 4, 5]


@pytest.mark.parametrize('kind', ['hash', 'difflib', 'embed'])
def test_groups_are_merged_each_for_itself(kind):
  # The classes of group 1 do not depend on what group 0 has in between.
  texts = (LONG, LONG + ' today')
  found = semantic.classes(
      kind, 0.95, np.array([0, 0, 1]), np.array([0, 1, 1]), texts, _embed
  )
  assert found[0] == found[1] != found[2]


@pytest.mark.parametrize('kind, threshold', [('hash', 0.98), ('difflib', 0.96)])
@pytest.mark.parametrize(
    'visits, merged',
    [
        ([1, 5, 1], [0, 0, 0]),  # The middle is similar to both ends,
        ([5, 1, 1], [0, 0, 2]),  # which are not similar to each other.
        ([1, 1, 5], [0, 1, 1]),
        ([1, 1, 1], [0, 0, 2]),  # Ties by text.
    ],
)
def test_the_state_of_most_visits_opens_the_class(
    kind, threshold, visits, merged
):
  texts = (LONG, LONG + ' very soon', LONG + ' very soon indeed so')
  states = np.repeat(np.arange(3), visits)
  found = _classes(kind, states=states, texts=texts, threshold=threshold)
  first = np.cumsum([0, *visits[:2]])
  assert [list(first).index(found[i]) for i in first] == merged


def test_a_text_without_a_vector_is_like_no_other():
  assert _classes('embed', texts=('-', '+', 'a'), threshold=0.1) == [0, 1, 2]


def test_embeddings_need_a_policy():
  with pytest.raises(ValueError, match="set ProGPO.classes = 'hash'"):
    semantic.classes('embed', 0.9, np.zeros(1, int), np.zeros(1, int), ('a',))


@pytest.mark.parametrize('kind, threshold', [('hash', 0.98), ('difflib', 0.96)])
def test_ties_go_by_text_whatever_the_ids(kind, threshold):
  texts = (LONG + ' very soon indeed so', LONG + ' very soon', LONG)
  assert _classes(kind, texts=texts, threshold=threshold) == [0, 1, 1]


@pytest.mark.parametrize('kind', ['norm', 'hash', 'difflib', 'embed'])
def test_every_state_needs_a_text(kind):
  with pytest.raises(ValueError, match='got 1 state texts for state ids up to'):
    _classes(kind, states=[0, 2], texts=('a',))
