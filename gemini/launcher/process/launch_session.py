"""Session: the options of one run, which travel from the launcher to the program's process and its children.

A session consists of strings, booleans, lists and dicts only, so that it fits into a constant of a code object and into
a command line.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class SpecialRun(TypedDict, total=False):
        """Where `gemini compile` records `record_steps` steps, and `gemini check` writes its results."""

        record: str
        record_steps: int
        check: str

    class Session(SpecialRun):
        """The options of a run that are used after its start.

        The launcher computes `main`, the file of the program; `registered`, the available passes; and `triggers`, of
        which a file must contain one to be affected by a pass (none: every file may be).
        """

        passes: list[str]
        skip: list[str]
        registered: list[tuple[str, str, str]]
        triggers: list[str]
        instrument: list[str]
        flags: dict[str, str | float | bool]
        config: str | None
        quiet: bool
        main: str | None


_current: Session | None = None


def current() -> Session | None:
    """Return the session of this process; None if `gemini_python` did not start it."""
    return _current


def enter(session: Session) -> None:
    """Make `session` the session of this process."""
    global _current  # noqa: PLW0603 - a process has one session, set once when it begins
    _current = session
