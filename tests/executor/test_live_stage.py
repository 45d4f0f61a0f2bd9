"""A stage as a worker runs it: what it writes to is known from its first forward, in every mode."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from gemini.capture.forms import Ref
from gemini.codegen.interface import Interface, Port
from gemini.runtime.executor.stage import Kept, LiveStage


def _port(name: str, source: int) -> Port:
    return Port(name, Ref(source), source, (1,), is_result=False, meta=None)


def _stage(module: nn.Module) -> LiveStage:
    return LiveStage(1, module, Interface(1, 0, (_port("hidden", 0),), (_port("out", 1),)))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_writes_to_what_arrives_are_seen_in_the_first_forward(mode: type[AbstractContextManager[None]]) -> None:
    stage = _stage(nn.ReLU(inplace=True))
    given = torch.tensor([-1.0, 2.0])
    for _ in range(3):
        with mode():
            made = stage.forward([given], Kept())
        assert made["out"].tolist() == [0.0, 2.0]
        assert given.tolist() == [-1.0, 2.0]
    assert stage.written == {"hidden"}
