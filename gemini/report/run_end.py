"""Report at the end of a run: the setting `report`, checked before the run and written after it."""

from __future__ import annotations

import atexit
import importlib.util
import os
from pathlib import Path

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError, Fault, GeminiError
from gemini.log import log_line

_registered: set[tuple[int, str]] = set()


def check_report(config: GeminiConfig) -> None:
    """Raise ConfigError if the page of the setting `report` cannot be written; without that setting do nothing."""
    if config.report is None:
        return
    faults, target = [], Path(config.report)
    if importlib.util.find_spec("jinja2") is None:
        what = f"report = {config.report!r}: a page needs jinja2, which is not installed"
        faults.append(Fault(what, "pip install 'gemini-instrumenter[report]'"))
    if target.is_dir():
        faults.append(Fault(f"report = {config.report!r}: it is a folder", "name a file in it, as in report.html"))
    elif not target.absolute().parent.is_dir():
        faults.append(Fault(f"report = {config.report!r}: no folder {target.parent}", "create it"))
    if faults:
        raise ConfigError(faults)


def write_at_exit(config: GeminiConfig) -> None:
    """Write the page of the setting `report` when this process ends; call this before its journal is created."""
    if config.report is not None:
        target = str(Path(config.report).absolute())
        if (os.getpid(), target) not in _registered:
            _registered.add((os.getpid(), target))
            settings = GeminiConfig(**config.to_dict() | {"report": target})
            folder, owner = Path(config.run_folder).absolute(), os.getpid()
            atexit.register(lambda: write_now(settings, folder) if os.getpid() == owner else None)


def write_now(config: GeminiConfig, folder: Path) -> None:
    """Write the page of the setting `report`; a failure logs one line."""
    if config.report is None:
        return
    from gemini.report.report_page import write_report

    try:
        text = f"report: {write_report(folder, Path(config.report))}"
    except (GeminiError, OSError) as error:
        text = f"no report: {error}".partition("\n")[0]
    if not config.quiet:
        log_line(f"gemini: {text}")
