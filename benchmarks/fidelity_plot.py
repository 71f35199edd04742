"""The fidelity study as a picture: dots with intervals, as plain SVG."""

from __future__ import annotations

from collections.abc import Mapping
import html

from hgpo_jax.credit import fidelity

_ROW, _DOT_GAP = 34, 8
_LEFT, _TOP, _WIDTH, _GAP, _BOTTOM = 176, 74, 250, 44, 34
_COLOURS = ('#9ecae1', '#4292c6', '#08458c')  # By group size, small to large.
_STYLE = """
text { font: 12px system-ui, 'DejaVu Sans', sans-serif; fill: #1d232b; }
.soft { fill: #5c6672; font-size: 11px; } .title { font-weight: 600; }
.grid { stroke: #e2e0db; } .zero { stroke: #9aa4b0; }
.ceiling { fill: #14795a; opacity: .14; }
.ceiling-line { stroke: #14795a; stroke-dasharray: 4 3; }
"""


def draw(panels: Mapping[str, fidelity.Table], heads: Mapping[str, str]) -> str:
  """A column of dots a policy and figure, a row an estimator.

  Args:
    panels: figures of `fidelity.compare`, by title.
    heads: figures to show, and what they are called.
  """
  first = next(iter(panels.values()))
  names = [name for name in first if name != fidelity.CEILING]
  sizes = sorted({size for name in names for size in first[name]})
  columns = [
      (title, key, table) for title, table in panels.items() for key in heads
  ]
  width = _LEFT + len(columns) * (_WIDTH + _GAP)
  height = _TOP + len(names) * _ROW + _BOTTOM
  parts = [
      f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}"'
      f' height="{height}" viewBox="0 0 {width} {height}" role="img">',
      f'<style>{_STYLE}</style>',
      f'<rect width="{width}" height="{height}" fill="#fff"/>',
      *_legend(sizes),
  ]
  for row, name in enumerate(names):
    y = _TOP + (row + 0.5) * _ROW
    parts.append(_text(_LEFT - 14, y + 4, name, 'end'))
  for place, (title, key, table) in enumerate(columns):
    x = _LEFT + place * (_WIDTH + _GAP)
    parts += _frame(x, len(names), title, heads[key])
    if fidelity.CEILING in table:
      parts += _ceiling(x, table[fidelity.CEILING][0][key], len(names))
    for row, name in enumerate(names):
      for k, size in enumerate(sizes):
        y = _TOP + (row + 0.5) * _ROW + (k - 0.5 * (len(sizes) - 1)) * _DOT_GAP
        parts += _dot(x, y, table[name][size][key], _colour(k, len(sizes)))
  return '\n'.join([*parts, '</svg>\n'])


def _at(x: float, value: float) -> float:
  """Pixels of a value; the axis goes from -0.25 to 1."""
  return x + _WIDTH * (min(max(value, -0.25), 1.0) + 0.25) / 1.25


def _colour(k: int, count: int) -> str:
  return _COLOURS[round(k * (len(_COLOURS) - 1) / max(count - 1, 1))]


def _frame(x: float, rows: int, title: str, head: str) -> list[str]:
  bottom = _TOP + rows * _ROW
  parts = [
      _text(x, _TOP - 30, title, 'start', 'title'),
      _text(x, _TOP - 14, head, 'start', 'soft'),
  ]
  for tick in (-0.25, 0.0, 0.25, 0.5, 0.75, 1.0):
    at, kind = _at(x, tick), 'grid' if tick else 'zero'
    parts.append(
        f'<line class="{kind}" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}"'
        f' y2="{bottom}"/>'
    )
    parts.append(_text(at, bottom + 16, f'{tick:g}', 'middle', 'soft'))
  return parts


def _ceiling(x: float, found: fidelity.Interval, rows: int) -> list[str]:
  low, high, at = (_at(x, v) for v in (found.low, found.high, found.value))
  bottom = _TOP + rows * _ROW
  return [
      f'<rect class="ceiling" x="{low:.1f}" y="{_TOP}"'
      f' width="{high - low:.1f}" height="{rows * _ROW}"/>',
      f'<line class="ceiling-line" x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}"'
      f' y2="{bottom}"/>',
  ]


def _dot(
    x: float, y: float, found: fidelity.Interval, colour: str
) -> list[str]:
  low, high, at = (_at(x, v) for v in (found.low, found.high, found.value))
  return [
      f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y:.1f}" y2="{y:.1f}"'
      f' stroke="{colour}" stroke-width="2"/>',
      f'<circle cx="{at:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>',
  ]


def _legend(sizes: list[int]) -> list[str]:
  parts = [_text(_LEFT, 20, 'group size', 'start', 'soft')]
  for k, size in enumerate(sizes):
    x, colour = _LEFT + 78 + 46 * k, _colour(k, len(sizes))
    parts.append(f'<circle cx="{x}" cy="16" r="4" fill="{colour}"/>')
    parts.append(_text(x + 9, 20, str(size), 'start', 'soft'))
  x = _LEFT + 96 + 46 * len(sizes)
  parts.append(
      f'<line class="ceiling-line" x1="{x}" x2="{x + 18}" y1="16" y2="16"/>'
  )
  parts.append(
      _text(x + 24, 20, fidelity.CEILING + ' of the truth', 'start', 'soft')
  )
  return parts


def _text(x: float, y: float, text: str, anchor: str, kind: str = '') -> str:
  return (
      f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
      f'{html.escape(text)}</text>'
  )
