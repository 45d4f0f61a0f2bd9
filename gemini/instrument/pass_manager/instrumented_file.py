"""A file after its passes: the new text, the result of each pass, and the code to run."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from types import CodeType

from gemini.instrument.passes.base import Changed, Failed, Result
from gemini.instrument.text.parser import compile_data, compile_tree, mute_parser_warnings, pause_collector
from gemini.instrument.text.positions import PositionMap
from gemini.instrument.text.source_file import SourceFile


@dataclass(frozen=True)
class Instrumented:
    """The result of running the passes over one file.

    `text` is the original's where nothing changed; `positions` maps positions in it back to the original.
    """

    source: SourceFile
    text: str
    results: tuple[Result, ...]
    positions: PositionMap
    _tree: ast.Module | None = field(default=None, repr=False, compare=False)
    _code: dict[int, CodeType] = field(default_factory=dict, repr=False, compare=False)

    @property
    def changed(self) -> bool:
        """Whether any pass changed the text."""
        return self._tree is not None

    @property
    def data(self) -> bytes:
        """The new text as bytes in the file's encoding; the original bytes where nothing changed."""
        return self.source.encode(self.text) if self.changed else self.source.data

    @property
    def tree(self) -> ast.Module:
        """The tree of the new text; its nodes carry positions in the *original*. Read-only."""
        return self.source.tree if self._tree is None else self._tree

    @property
    def changes(self) -> tuple[Changed, ...]:
        """The results of the passes that changed the file."""
        return tuple(result for result in self.results if isinstance(result, Changed))

    @property
    def failures(self) -> tuple[Failed, ...]:
        """The results of the passes that failed."""
        return tuple(result for result in self.results if isinstance(result, Failed))

    def code(self, optimize: int = -1) -> CodeType:
        """Return the code object, with positions, file name, docstrings and `-O` as of the original file."""
        level = sys.flags.optimize if optimize == -1 else optimize
        if level not in self._code:
            with pause_collector():
                self._code[level] = self._compile(level)
        return self._code[level]

    def _compile(self, optimize: int) -> CodeType:
        if self._tree is not None:
            return compile_tree(self._tree, self.source.path, optimize)
        if "tree" not in vars(self.source):
            return compile_data(self.source.data, self.source.path, optimize)
        # Compiling the existing tree saves a second parse and does not repeat the parser's warnings.
        try:
            return compile_tree(self.source.tree, self.source.path, optimize)
        except RecursionError:  # Python accepts deeper nesting in source than in a tree
            with mute_parser_warnings():
                return compile_data(self.source.data, self.source.path, optimize)
