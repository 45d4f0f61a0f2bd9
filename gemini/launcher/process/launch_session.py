"""What one run was asked to do, as it travels from the launcher to the program's process and on to its children.

A session is made of strings, booleans, lists and dicts only, so that it fits into a constant of a code object and
into a command line.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TypedDict

    class Session(TypedDict):
        """The options of a run that matter after its start.

        The launcher fills in `main`, the program's own file; `registered`, the passes there are; and `triggers`, one
        of which a file must contain to be affected by any pass (none: every file may be). So the program's process
        need not find these out again.
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
    """The session of this process; None where it was not started by `gemini_python`."""
    return _current


def enter(session: Session) -> None:
    """Make `session` this process's own."""
    global _current  # noqa: PLW0603 - a process has one session, set once when it begins
    _current = session
