"""A test pass that replaces the text "plain" by "instrumented"."""

from __future__ import annotations

from pathlib import Path

from launching import Case

_PASS = """
import ast
from gemini.instrument.text.edits import Edit
from gemini.instrument.passes.base import Pass

class Shout(Pass):
    name = "shout"
    description = "replaces a word"
    triggers = ("plain",)

    def edits(self, unit):
        for node in unit.nodes(ast.Constant):
            if node.value == "plain":
                yield Edit.replace(node, '"instrumented"')

class Broken(Pass):
    name = "broken"
    description = "raises"
    triggers = ("break the pass",)

    def edits(self, unit):
        raise KeyError("a fault of the pass")
"""

FILES: dict[str, str | bytes] = {
    "plugins/shouting.py": _PASS,
    "plugins/shouting-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n",
    "plugins/shouting-1.0.dist-info/entry_points.txt": (
        "[gemini.passes]\nshout = shouting:Shout\nbroken = shouting:Broken\n"
    ),
}
ENV = {"PYTHONPATH": "{}/plugins"}


def with_plugin(name: str, files: dict[str, str | bytes], *argv: str) -> Case:
    """A case whose passes include `shout`."""
    return Case(name, list(argv) or ["main.py"], {**FILES, **files}, env=ENV)


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "project"
