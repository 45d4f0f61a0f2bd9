"""Misplaced options: a hint where a script refuses options of `gemini_python` that follow it.

    gemini_python train.py --mode pipeline
    train.py: error: unrecognized arguments: --mode pipeline
    gemini_python: --mode is an option of gemini_python: it goes before the script

The text is added to the error of `argparse`, which ends the script as before. The program's process loads this module
before the user's first statement: it imports only modules that Python has already loaded.
"""

from __future__ import annotations

import sys

from gemini.launcher.process.launch_session import current
from gemini.launcher.process.stdlib_patch import patch_expression

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from gemini.launcher.process.import_hook import ImportHook

LAUNCHER_OPTIONS = frozenset(
    ("--config", "--diff", "--dump", "--instrument", "--no-gemini", "--passes", "--skip-pass")
)  # that are no settings
_ERROR = r"_('%(prog)s: error: %(message)s\n') % args"


def install_hook(hook: ImportHook, argv: list[str]) -> None:
    """Add hints to errors of `argparse`, once the program imports it, if the program has options."""
    if any(word.startswith("--") for word in argv[1:]):
        hook.followers["argparse"] = __name__


def follow(name: str) -> None:
    """Patch `argparse`, which has just been imported."""
    error: Any = sys.modules[name].ArgumentParser.error
    patch_expression(error, _ERROR, f"({_ERROR}) + _misplaced_options(message)", _misplaced_options=hint_for_error)


def hint_for_error(message: str) -> str:
    """Return the line that follows an error of `argparse`; empty where it names no option of `gemini_python`."""
    session = current()
    if session is None or session["quiet"]:
        return ""
    # The text may be translated.
    begin: str = sys.modules["argparse"]._("unrecognized arguments: %s").partition("%s")[0]
    if not message.startswith(begin):
        return ""
    words = [word.partition("=")[0] for word in message.removeprefix(begin).split()]
    found = list(dict.fromkeys(word for word in words if word.startswith("--") and _is_own(word)))
    if not found:
        return ""
    what = "is an option of gemini_python: it goes" if len(found) == 1 else "are options of gemini_python: they go"
    return f"gemini_python: {' and '.join(found)} {what} before the script\n"


def _is_own(option: str) -> bool:
    if option in LAUNCHER_OPTIONS:
        return True
    try:
        from gemini.config.gemini_config import ALIASES, GeminiConfig
    except ImportError:  # the program's own modules hide one of the library
        return False
    return option[2:].replace("-", "_") in {*ALIASES, *GeminiConfig.__dataclass_fields__}
