"""Workers that would exceed the available memory are refused before any starts."""

from __future__ import annotations

import pytest
from torch import nn

from gemini import GeminiCompiler, GeminiConfig
from gemini.errors import ConfigError
from gemini.runtime.devices.host_memory import available_memory

MANY = 1_000_000


@pytest.mark.skipif(available_memory() is None, reason="how much memory there is cannot be found out")
def test_too_many_workers_are_refused_with_what_could_be_had() -> None:
    config = GeminiConfig(mode="pipeline", pipeline_degree=MANY, quiet=True)
    with pytest.raises(ConfigError, match=rf"{MANY} workers on this host need 155\.0 TB.*is available") as raised:
        GeminiCompiler().compiler(nn.Linear(2, 2), config=config)
    assert "or fewer (pipeline_degree" in str(raised.value)
