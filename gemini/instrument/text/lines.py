"""Lines and columns of a text, as `ast` counts them.

Python's tokenizer ends a line at ``\\n``, ``\\r\\n`` or a lone ``\\r`` and nowhere else (form feeds, vertical tabs and
Unicode separators stay inside a line), and `ast` columns count UTF-8 bytes. `Lines` converts such positions to
offsets in the text and back, exactly, for all line ends and characters.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from functools import cached_property
from itertools import accumulate

_LINE_END = re.compile(r"\r\n|\r|\n")


class Lines:
    """The line table of one text; positions are (line from 1, UTF-8 column from 0)."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def starts(self) -> list[int]:
        """Offset of the first character of every line; a text that ends in a line end has no empty last line."""
        if "\r" in self.text:
            starts = [0, *(found.end() for found in _LINE_END.finditer(self.text))]
        else:
            starts = [0, *accumulate([len(line) + 1 for line in self.text.split("\n")])]
            starts.pop()
        if len(starts) > 1 and starts[-1] == len(self.text):
            starts.pop()
        return starts

    @cached_property
    def _ascii(self) -> bool:
        return self.text.isascii()

    @property
    def count(self) -> int:
        """The number of lines; an empty text has one."""
        return len(self.starts)

    @property
    def line_ends(self) -> int:
        """The number of line ends in the text."""
        return len(self.starts) - 1 + (self.text[-1:] in ("\n", "\r"))

    def line(self, number: int) -> str:
        """Return line `number` without its line end."""
        return self.line_with_end(number).rstrip("\r\n")

    def line_with_end(self, number: int) -> str:
        """Return line `number` with its line end."""
        starts = self.starts
        end = starts[number] if number < len(starts) else len(self.text)
        return self.text[starts[number - 1] : end]

    def offset(self, line: int, column: int) -> int:
        """Return the offset in the text of an `ast` position."""
        starts = self.starts
        if line > len(starts):
            return len(self.text)
        start = starts[line - 1]
        if self._ascii:
            return start + column
        content = self.line_with_end(line)
        if content.isascii():
            return start + column
        return start + len(content.encode("utf-8", "surrogatepass")[:column].decode("utf-8", "replace"))

    def position(self, offset: int) -> tuple[int, int]:
        """Return the `ast` position of an offset in the text."""
        line = bisect_right(self.starts, offset)
        start = self.starts[line - 1]
        if self._ascii:
            return line, offset - start
        return line, len(self.text[start:offset].encode("utf-8", "surrogatepass"))


def line_ends(text: str) -> list[str]:
    """Return the line ends in `text`, in order, as written."""
    return _LINE_END.findall(text)


def caret(line: str, column: int, width: int = 1) -> str:
    """Return `line` without its indentation, and carets under `width` characters from `column`."""
    shown = line.lstrip()
    cut = len(line) - len(shown)
    start = max(column - cut, 0)
    # Tabs stay in the padding so that the caret stays under its character at any tab width.
    padding = "".join("\t" if char == "\t" else " " for char in shown[:start])
    return f"    {shown.rstrip()}\n    {padding}{'^' * max(1, min(width, len(shown.rstrip()) - start))}"
