"""Sphinx configuration of the documentation site: `make docs` writes it to build/site, and warnings are errors.

The pages are the Markdown files of this folder. Pages in `generated/` are written from the code when the site is built
(`generated_pages.py`), and CHANGELOG and CONTRIBUTING are included.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from generated_pages import write_pages

from gemini import __version__

project = "Gemini"
version = release = __version__
copyright = "the authors of Gemini"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"Gemini {__version__}"
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True

_ROOT_PAGES = {"../CHANGELOG.md": "generated/changelog.md", "../CONTRIBUTING.md": "generated/contributing.md"}


def _link_root_pages(_: Any, __: str, source: list[str]) -> None:
    """Point links to files above this folder to the pages that include them."""
    for file, page in _ROOT_PAGES.items():
        source[0] = source[0].replace(f"]({file})", f"]({page})")


def _quote_drawings(_: Any, __: str, ___: str, ____: Any, _____: Any, lines: list[str]) -> None:
    """Show docstrings as they are written: they are prose with drawings and tables, not reStructuredText."""
    if any(line.startswith("    ") for line in lines):
        lines[:] = ["::", "", *(f"    {line}" for line in lines), ""]
    else:
        lines[:] = [line.replace("`", "``") if "``" not in line else line for line in lines]


def setup(app: Any) -> None:
    """Register the hooks."""
    write_pages(Path(__file__).parent)
    app.connect("source-read", _link_root_pages)
    app.connect("autodoc-process-docstring", _quote_drawings)
