"""The passes of a session, run over one file at a time.

Everything that instrumenting needs is imported here and nowhere else in this folder, so that a process pays for it
only when it comes to a file of the user's own.
"""

from __future__ import annotations

import ast
import codecs
from types import CodeType
from typing import TYPE_CHECKING

from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.pass_manager.registry import Registered, available, select
from gemini.instrument.text.parser import parser_warnings_muted
from gemini.instrument.text.source_file import SourceFile
from gemini.log import tell

if TYPE_CHECKING:
    from gemini.launcher.process.launch_session import Session


# Python reads Latin-1 source without its codec. We need the codec, so it is loaded while imports surely work: Python
# remembers a codec that could not be loaded once, and a program may be in the middle of changing how imports work.
codecs.lookup("iso-8859-1")


class Instrumenter:
    """Runs the passes that a session asks for, and says in one line where one of them fails."""

    def __init__(self, session: Session) -> None:
        known = session["registered"] or [(one.name, one.origin, one.target) for one in available()]
        notice = None if session["quiet"] else _say
        registered = [Registered(*one) for one in known]
        chosen = select(session["passes"], session["skip"], notice=notice, registered=registered)
        self._manager = PassManager(chosen, notice=notice)
        self._manager.schedule()  # raises for a cycle now rather than at the first file
        session["registered"] = known
        session["triggers"] = (
            []
            if not all(one.triggers for one in chosen)
            else sorted({trigger for one in chosen for trigger in one.triggers})
        )

    def tree(self, source: SourceFile) -> ast.Module:
        """The tree of `source` after the passes, with the positions of the original."""
        return self._manager.run(source).tree

    def code(self, path: str, data: bytes, module: str) -> CodeType | None:
        """The code of a file after the passes; None where they change nothing."""
        with parser_warnings_muted():  # Python has compiled the file already, and warned
            done = self._manager.run(SourceFile(path, data, module))
            return done.code() if done.changed else None


def _say(notice: str) -> None:
    tell(f"gemini_python: {notice}")
