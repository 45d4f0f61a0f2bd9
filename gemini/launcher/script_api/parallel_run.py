"""Parallel run: the first statement of a program that `gemini compile` has written.

    __import__("gemini.managed").managed.run_parallel(__file__)

It makes this process what `gemini_python` would start, with the settings, plans and stages of the folder of the file.
Under `gemini_python` itself they are added to its options: `gemini_python --verify parallel/train.py`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemini.launcher.process.launch_session import Session

CONFIG, STAGES = "config.json", "stages"


def run_parallel(file: str) -> None:
    """Run the rest of the program by the plans beside `file`; without effect in child processes and in a copy."""
    folder = os.path.dirname(os.path.abspath(file))
    if not os.path.isdir(os.path.join(folder, STAGES)) or _is_child():
        return
    from gemini.launcher.process import launch_session

    session, config = launch_session.current(), os.path.join(folder, CONFIG)
    if session is not None:  # of gemini_python
        session["flags"].setdefault("program", folder)
        session["config"] = session["config"] or config
        return
    _install({
        "passes": [], "skip": [], "registered": [], "triggers": [], "instrument": [], "flags": {"program": folder},
        "config": config, "quiet": _is_quiet(config), "main": os.path.abspath(file),
    })  # fmt: skip


def _is_child() -> bool:
    """Whether multiprocessing has started this process: children train as under `python`."""
    process = sys.modules.get("multiprocessing.process")
    return process is not None and process.parent_process() is not None


def _install(session: Session) -> None:
    from gemini.launcher import tensorflow_import_hook, torch_import_hook
    from gemini.launcher.process.bootstrap import install
    from gemini.launcher.process.import_isolation import library_path

    hook = install(session, library_path())
    torch_import_hook.install_hook(session, hook)
    tensorflow_import_hook.install_hook(session, hook)


def _is_quiet(config: str) -> bool:
    try:
        with open(config, encoding="utf-8") as file:
            return bool(json.load(file).get("quiet"))
    except (OSError, ValueError, AttributeError):  # reported when the configuration is loaded
        return False
