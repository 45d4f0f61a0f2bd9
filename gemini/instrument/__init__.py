"""Reads Python source and changes it on its own lines.

In the order of the flow:

    program/     the user's own files: the code tree, which files are theirs, instrumented when imported
    text/        one file: bytes → text → tree; edits on the same lines, and the way back to the original positions
    naming/      what its names mean
    dsl/         what is recognised of PyTorch and TensorFlow
    passes/      what is changed: the passes, and the declarative form (`Rewrite`)
    applying/    passes found, put in order, run over a file, and verified
    launch/      the program run as `python` would run it
    output/      the result for people: dumps, patches

Nothing here imports a framework.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemini.instrument.pass_manager.manager import PassManager
    from gemini.instrument.passes.base import Pass
    from gemini.instrument.passes.pass_input import Unit
    from gemini.instrument.passes.pattern import Rewrite
    from gemini.instrument.text.edits import Edit
    from gemini.instrument.text.source_file import SourceFile

__all__ = ["Edit", "Pass", "PassManager", "Rewrite", "SourceFile", "Unit"]

_HOMES = {
    "Edit": "text.edits",
    "Pass": "passes.base",
    "PassManager": "pass_manager.manager",
    "Rewrite": "passes.pattern",
}
_HOMES |= {"SourceFile": "text.source_file", "Unit": "passes.pass_input"}


def __getattr__(name: str) -> object:
    """Import a public name when it is first asked for: the launcher pays for what it uses."""
    if name not in _HOMES:
        raise AttributeError(f"module 'gemini.instrument' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"gemini.instrument.{_HOMES[name]}"), name)
