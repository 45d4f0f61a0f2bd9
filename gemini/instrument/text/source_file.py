"""One Python source file: its bytes, text, syntax tree and positions.

Text and tree are derived from the bytes by Python's rules (PEP 263, byte order mark), once, on first access. The tree
is shared by all readers and must not be changed.
"""

from __future__ import annotations

import ast
import codecs
import io
import os
import tokenize
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

from gemini.instrument.text.lines import Lines


class Located(Protocol):
    """An object with the four `ast` position attributes."""

    lineno: int
    col_offset: int
    end_lineno: int | None
    end_col_offset: int | None


@dataclass(frozen=True)
class SourceFile:
    """The bytes of a source file, its path and its module name."""

    path: str
    data: bytes
    module: str = ""

    @classmethod
    def read(cls, path: str | os.PathLike[str], module: str = "") -> SourceFile:
        """Read the file at `path`."""
        return cls(os.fspath(path), Path(path).read_bytes(), module)

    @classmethod
    def from_text(cls, text: str, path: str = "<string>", module: str = "") -> SourceFile:
        """Return a source from text, as of `python -c`; an encoding declaration in it must be UTF-8."""
        return cls(path, text.encode("utf-8"), module)

    @property
    def is_package(self) -> bool:
        """Whether this is the ``__init__`` of a package: its relative imports start at the module itself."""
        return os.path.basename(self.path).partition(".")[0] == "__init__"

    @cached_property
    def bom(self) -> bool:
        """Whether the bytes begin with UTF-8's byte order mark, which is not part of the text."""
        return self.data.startswith(codecs.BOM_UTF8)

    @cached_property
    def encoding(self) -> str:
        """The encoding by which Python reads the bytes; raises Python's `SyntaxError`."""
        try:
            return tokenize.detect_encoding(io.BytesIO(self.data).readline)[0].removesuffix("-sig")
        except SyntaxError:
            self._parse()  # Python's report of the same fault has the file, the line and its text
            raise

    @cached_property
    def text(self) -> str:
        """The decoded text with the line ends of the file, without a byte order mark."""
        data = self.data[len(codecs.BOM_UTF8) :] if self.bom else self.data
        encoding = self.encoding
        try:
            return data.decode(encoding)
        except UnicodeDecodeError:
            self._parse()
            raise

    @cached_property
    def tree(self) -> ast.Module:
        """The syntax tree, shared and read-only; raises Python's `SyntaxError`."""
        return self._parse()

    @cached_property
    def lines(self) -> Lines:
        """The line table of the text."""
        return Lines(self.text)

    def offset(self, line: int, column: int) -> int:
        """Return the offset in `text` of an `ast` position (line from 1, UTF-8 column from 0)."""
        return self.lines.offset(line, column)

    def position(self, offset: int) -> tuple[int, int]:
        """Return the `ast` position of an offset in `text`."""
        return self.lines.position(offset)

    def span(self, node: Located) -> tuple[int, int]:
        """Return the start and end offsets of `node` in `text`."""
        end_line = node.lineno if node.end_lineno is None else node.end_lineno
        end_column = node.col_offset if node.end_col_offset is None else node.end_col_offset
        return self.offset(node.lineno, node.col_offset), self.offset(end_line, end_column)

    def segment(self, node: Located) -> str:
        """Return the text of `node`, as written."""
        start, end = self.span(node)
        return self.text[start:end]

    def encode(self, text: str) -> bytes:
        """Encode `text` as this file is encoded, with a byte order mark if it has one."""
        data = text.encode(self.encoding)
        return codecs.BOM_UTF8 + data if self.bom else data

    def with_text(self, text: str) -> SourceFile:
        """Return this file with another text."""
        other = SourceFile(self.path, self.encode(text), self.module)
        other.__dict__.update(text=text, encoding=self.encoding, bom=self.bom)
        return other

    def _parse(self) -> ast.Module:
        tree = compile(self.data, self.path, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
        assert isinstance(tree, ast.Module)
        return tree
