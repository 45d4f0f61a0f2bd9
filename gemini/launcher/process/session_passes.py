"""The passes of a session, applied to one file at a time.

Only this module of the package imports the pass manager, so that a process loads it for the first file of the user.
"""

from __future__ import annotations

import ast
import codecs
from types import CodeType
from typing import TYPE_CHECKING

from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.pass_manager.registry import Registered, available, select
from gemini.instrument.text.parser import mute_parser_warnings
from gemini.instrument.text.source_file import SourceFile
from gemini.log import log_line

if TYPE_CHECKING:
    from gemini.launcher.process.launch_session import Session


# Decoding Latin-1 source needs the codec, which Python itself does not load for it. It is loaded while imports work:
# Python caches a failed codec lookup, and a program may replace the import system.
codecs.lookup("iso-8859-1")


class Instrumenter:
    """Runs the passes of a session, and reports a failed one in one line."""

    def __init__(self, session: Session) -> None:
        known = session["registered"] or [(one.name, one.origin, one.target) for one in available()]
        notice = None if session["quiet"] else _print_notice
        registered = [Registered(*one) for one in known]
        chosen = select(session["passes"], session["skip"], notice=notice, registered=registered)
        self._manager = PassManager(chosen, notice=notice)
        self._manager.schedule()  # raises for a cycle before the first file
        session["registered"] = known
        session["triggers"] = (
            []
            if not all(one.triggers for one in chosen)
            else sorted({trigger for one in chosen for trigger in one.triggers})
        )

    def tree(self, source: SourceFile) -> ast.Module:
        """Return the tree of `source` after the passes, with the positions of the original."""
        return self._manager.run(source).tree

    def code(self, path: str, data: bytes, module: str) -> CodeType | None:
        """Return the code of a file after the passes; None if they change nothing."""
        with mute_parser_warnings():  # Python has already compiled the file, with warnings
            done = self._manager.run(SourceFile(path, data, module))
            return done.code() if done.changed else None


def _print_notice(notice: str) -> None:
    log_line(f"gemini_python: {notice}")
