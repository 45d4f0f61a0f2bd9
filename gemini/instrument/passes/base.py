"""What a pass is, and what comes of running one.

A pass looks at one file and says which edits it wants; it never changes text or tree itself. What came of it is a
value: `Changed`, `Skipped` with the reason, or `Failed` with a message that shows the place.
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

    `needs` names passes whose result this one must see; passes that do not need each other all see the same text.
    `triggers` are substrings: a file that has none of them cannot be affected and is skipped unread. They must be the
    spelling of something every affected file contains, such as the module that is imported (``torch``); no triggers
    means that every file is looked at.
    """

    name: str = ""
    description: str = ""
    needs: tuple[str, ...] = ()
    triggers: tuple[str, ...] = ()

    @abstractmethod
    def edits(self, unit: Unit) -> Iterable[Edit]:
        """The edits this pass wants in `unit`; none where it does not apply."""


@dataclass(frozen=True)
class Changed:
    """The pass changed the file by these edits, whose spans are in the text the pass saw."""

    pass_name: str
    edits: tuple[Edit, ...]


@dataclass(frozen=True)
class Skipped:
    """The pass left the file as it is, for this reason."""

    pass_name: str
    reason: str


@dataclass(frozen=True)
class Failed:
    """The pass could not be applied; the file goes on without it. `message` shows file, line, source and caret."""

    pass_name: str
    message: str
    line: int = 0

    @property
    def notice(self) -> str:
        """The failure in one line."""
        return self.message.partition("\n")[0]


Result = Changed | Skipped | Failed
