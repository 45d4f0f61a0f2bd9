"""Instrumentation: source-to-source passes over a program, on the lines of the original.

    program/        the user's files: code tree of a program, ownership, module search
    text/           one file: bytes → text → tree; edits on the same lines; the map to original positions
    names/          qualified names: scopes, imports, aliases
    passes/         the passes, and their declarative form (`Rewrite`)
    pass_manager/   registry, order, run and verification of passes
    inspect/        models, layers, losses and loops of PyTorch and TensorFlow source; pictures of syntax trees
    output/         dumps, headers, patches

No module of this package imports a framework or the launcher.
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

_MODULES = {
    "Edit": "text.edits",
    "Pass": "passes.base",
    "PassManager": "pass_manager.manager",
    "Rewrite": "passes.pattern",
}
_MODULES |= {"SourceFile": "text.source_file", "Unit": "passes.pass_input"}


def __getattr__(name: str) -> object:
    """Import a public name on first access, to keep the start of the launcher short."""
    if name not in _MODULES:
        raise AttributeError(f"module 'gemini.instrument' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"gemini.instrument.{_MODULES[name]}"), name)
