"""The inspector's page: one HTML file with all it needs inside."""

from __future__ import annotations

from collections.abc import Mapping
import html
import json
import pathlib
import re
from typing import Any

_PARTS = pathlib.Path(__file__).with_name('page')
# In the order in which they need each other.
_SCRIPTS = (
    'app.js',
    'detail.js',
    'episodes.js',
    'graph.js',
    'levels.js',
    'agreement.js',
    'main.js',
)


def render(data: Mapping[str, Any], title: str) -> str:
  """The page that shows `inspector.data`; it asks for nothing from outside.

  Args:
    data: what JSON can hold.
    title: of the page, such as the file that the episodes are from.
  """
  read = lambda name: (_PARTS / name).read_text(encoding='utf-8')
  # No text of an episode may end the element that it stands in.
  text = json.dumps(data, separators=(',', ':')).replace('<', '\\u003c')
  scripts = '\n'.join(read(name) for name in _SCRIPTS)
  parts = {
      '@title@': html.escape(title),
      '@style@': read('style.css'),
      '@script@': f"'use strict';\n(() => {{\n{scripts}}})();",
      '@data@': text,
  }
  page = read('inspector.html')
  # In one go: a part may hold the mark of another.
  marks = re.compile('|'.join(parts))
  return marks.sub(lambda found: parts[found.group()], page)
