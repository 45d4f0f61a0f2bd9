"""Reads Python source and changes it on its own lines.

In the order of the flow:

    lines, source      bytes → text, tree, positions
    index, names, unit what a pass sees: nodes by type, parents, scopes, resolved names
    passes/            the passes; `pattern` for the declarative ones; `registry` finds them all
    edits, splice      what passes ask for, made in the text; `positions` is the way back
    prelude            the one import that instrumented files carry
    manager            schedules the passes, runs them over a file, verifies what they did

Nothing here imports a framework.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemini.instrument.edits import Edit
    from gemini.instrument.manager import PassManager
    from gemini.instrument.passes.base import Pass
    from gemini.instrument.pattern import Rewrite
    from gemini.instrument.source import SourceFile
    from gemini.instrument.unit import Unit

__all__ = ["Edit", "Pass", "PassManager", "Rewrite", "SourceFile", "Unit"]

_HOMES = {"Edit": "edits", "Pass": "passes.base", "PassManager": "manager", "Rewrite": "pattern"}
_HOMES |= {"SourceFile": "source", "Unit": "unit"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: the launcher pays for what it uses."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gemini.instrument' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"gemini.instrument.{_HOMES[name]}"), name)
