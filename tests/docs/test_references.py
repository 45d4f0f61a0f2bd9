"""Documents agree with the tree: paths that they name exist, and the table of settings is that of the fields."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from gemini.config.gemini_config import GeminiConfig

ROOT = Path(__file__).parents[2]
PAGES = [
    path for path in (ROOT / "docs").glob("**/*.md") if path.parent.name != "generated"
]  # `make docs` writes those
DOCUMENTS = sorted([*ROOT.glob("*.md"), *PAGES, *(ROOT / "samples").glob("*/README.md")])
PATH = re.compile(r"(?<![\w./-])(?:gemini|tests|benchmarks|conformance|samples|docs)/[\w/.-]*\w")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_path_named_in_a_document_exists(document: Path) -> None:
    named = set(PATH.findall(document.read_text(encoding="utf-8")))
    assert not [path for path in sorted(named) if not (ROOT / path).exists()]


def test_the_life_of_a_step_names_files() -> None:
    named = PATH.findall((ROOT / "docs" / "internals" / "life_of_a_step.md").read_text(encoding="utf-8"))
    assert len({path for path in named if path.endswith(".py")}) > 40


def test_the_table_of_settings_is_that_of_the_fields() -> None:
    text = (ROOT / "docs" / "reference" / "config.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(--.*?)` \| `(.*?)` \| (.*) \|$", text, re.MULTILINE)
    defaults = GeminiConfig().to_dict()
    expected = [
        (
            entry.name,
            f"--{entry.name.replace('_', '-')} {entry.metadata['value']}".rstrip(),
            json.dumps(defaults[entry.name]),
            entry.metadata["help"],
        )
        for entry in fields(GeminiConfig)
    ]
    assert rows == expected


def test_every_page_is_in_the_index() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages = {str(path.relative_to(ROOT / "docs")) for path in PAGES} - {"index.md"}
    links = {target for target in re.findall(r"\]\(([^)#]+)\)", index) if target.endswith(".md")}
    assert pages == {target for target in links if not target.startswith("..")}


def test_every_anchor_of_a_link_is_a_heading() -> None:
    missing = []
    for document in DOCUMENTS:
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", document.read_text(encoding="utf-8")):
            page = document.parent / target if target else document
            headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
            slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            if anchor not in slugs:
                missing.append(f"{document.relative_to(ROOT)} → {target}#{anchor}")
    assert not missing
