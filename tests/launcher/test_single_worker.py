"""The log line for a single worker names whose choice that was."""

from __future__ import annotations

import pytest
from torch import nn

from gemini import GeminiConfig
from gemini.launcher import defaults
from gemini.launcher.auto import AutoPolicy


@pytest.mark.parametrize(("workers", "reason"), [(1, "one worker is requested"), (None, "this machine has one core")])
def test_why_there_is_one(workers: int | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr(defaults, "count_devices", lambda: 1)
    monkeypatch.setattr(AutoPolicy, "stay_local", lambda self, model, text: said.append(text))
    AutoPolicy(GeminiConfig(workers=workers)).decide(nn.Linear(2, 2))
    assert said[0].startswith(reason)
