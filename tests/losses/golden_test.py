"""Losses against the golden files."""

from __future__ import annotations

import pathlib

import pytest

from tests import golden_check

GIVEN = pathlib.Path(__file__).parents[1] / 'golden' / 'given'
CASES = {
    name: case
    for name, case in golden_check.read_cases(GIVEN)
    if name.startswith('LOSS')
}


@pytest.mark.parametrize('name', CASES)
def test_golden(name):
  assert golden_check.check_case(CASES[name]) == []
