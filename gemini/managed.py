"""The module that instrumented source imports as `__gemini__`; its functions live in `gemini.launcher.script_api`."""

from __future__ import annotations

from typing import Any

from gemini.launcher import script_api


def __getattr__(name: str) -> Any:
    """Return `name` from the script API, which the launcher may replace while a program runs."""
    return getattr(script_api, name)
