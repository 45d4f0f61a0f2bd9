"""Models that call the same modules in loops, and the steps of bytecode that a function takes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import gemini

WIDTH = 4


class CellLoop(nn.Module):
    """A recurrent cell and a head per column of the input, whose results are collected."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(1, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        hidden = torch.zeros(x.shape[0], WIDTH)
        state = torch.zeros(x.shape[0], WIDTH)
        for column in x.split(1, dim=1):
            hidden, state = self.cell(column, (hidden, state))
            outputs.append(self.head(hidden))
        return torch.cat(outputs, dim=1)


class LoopProgram(nn.Module):
    """Loops over a few modules and ops: `loops` are (iterations, body), a body is a list of instructions."""

    def __init__(self, loops: list[tuple[int, list[str]]]) -> None:
        super().__init__()
        self.loops = tuple((count, tuple(body)) for count, body in loops)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, collected = x, [x]
        for count, body in self.loops:
            for _ in range(count):
                for word in body:
                    if word in ("a", "b"):
                        x = (self.a if word == "a" else self.b)(x)
                    elif word == "first":
                        x = x + first
                    elif word == "tanh":
                        x = torch.tanh(x)
                    else:
                        collected.append(x)
        return torch.stack([x, *collected]).sum(0)


def count_operations(call: Callable[[], Any], *packages: str) -> int:
    """Return the bytecodes that functions of these packages of gemini execute during a call."""
    folders = tuple(str(Path(gemini.__file__).parent / package) for package in packages)
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if not frame.f_code.co_filename.startswith(folders):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count
