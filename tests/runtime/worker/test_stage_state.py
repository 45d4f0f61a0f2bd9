"""The first forward of a stage in a worker detects which arguments it writes, in every mode."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

from gemini.codegen.stage_interface import Interface, Port
from gemini.ir.pytree import Ref
from gemini.runtime.worker.stage_state import LiveStage, MicrobatchGraph


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
            made = stage.forward([given], MicrobatchGraph())
        assert made["out"].tolist() == [0.0, 2.0]
        assert given.tolist() == [-1.0, 2.0]
    assert stage.written == {"hidden"}


class _Repeats(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.ones(2))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.query.expand(len(hidden), 2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_view_of_a_parameter_has_no_place_in_a_graph_without_gradients(
    mode: type[AbstractContextManager[None]],
) -> None:
    stage, kept, given = _stage(_Repeats()), MicrobatchGraph(), torch.zeros(3, 2)
    with mode():
        assert stage.forward([given], kept)["out"].tolist() == [[1.0, 1.0]] * 3
    assert not kept.edges
    stage.forward([given], kept)
    assert set(kept.edges) == {"out"}
