"""Interface of a pass, and the results of running one.

A pass reads one file and yields edits; it does not change text or tree. Its result is `Changed`, `Skipped` with the
reason, or `Failed` with a message that shows the source line.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gemini.instrument.text.edits import Edit

if TYPE_CHECKING:
    from gemini.instrument.passes.pass_input import Unit


class Pass(ABC):
    """One small, named transformation of source.

    `needs` names passes that must run before this one; passes that do not need each other read the same text.
    `triggers` are substrings of which every affected file contains one, such as the imported module (``torch``); a
    file without any is skipped before it is parsed. A pass without triggers reads every file.
    """

    name: str = ""
    description: str = ""
    needs: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()

    @abstractmethod
    def edits(self, unit: Unit) -> Iterable[Edit]:
        """Yield the edits of this pass in `unit`; none where it does not apply."""


@dataclass(frozen=True)
class Changed:
    """The pass changed the file by these edits, whose spans refer to the text the pass read."""

    pass_name: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Skipped:
    """The pass did not change the file, for this reason."""

    pass_name: str
    reason: str


@dataclass(frozen=True)
class Failed:
    """The pass could not be applied; the file runs without it. `message` shows file, line, source and caret."""

    pass_name: str
    message: str
    line: int = 0

    @property
    def notice(self) -> str:
        """The failure in one line."""
        return self.message.partition("\n")[0]


Result = Changed | Skipped | Failed
