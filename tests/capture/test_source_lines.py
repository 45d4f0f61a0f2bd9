"""Source locations of nodes are lines of the model's code, never of the tracer or its caller."""

from __future__ import annotations

import torch
from torch import nn

from gemini.capture.source_location import source_line
from gemini.runtime.tracebacks import __file__ as ours


def test_a_line_is_of_the_code_that_runs() -> None:
    assert source_line().startswith("capture/test_source_lines.py:")


def test_of_our_own_code_no_line_is_told() -> None:
    space = {"ask": source_line}
    exec(compile("told = ask()", ours, "exec"), space)
    assert space["told"] == ""


def test_a_model_below_our_own_code_is_told() -> None:
    class Asking(nn.Module):
        def forward(self, x: torch.Tensor) -> str:
            return source_line()

    space = {"model": Asking(), "x": torch.ones(1)}
    exec(compile("told = model(x)", ours, "exec"), space)
    assert str(space["told"]).startswith("capture/test_source_lines.py:")
