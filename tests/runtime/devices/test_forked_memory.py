"""A forked process has a copy of the memory that its parent shares with workers, as it has of all other memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.devices import forked_memory
from gemini.runtime.devices.cpu import MappedSegment


def run_forked(ask: Callable[[], bool], meanwhile: Callable[[], object]) -> bool:
    """Return what a forked process answers after the parent has done something."""
    begin, begins = os.pipe()
    child = os.fork()
    if child == 0:
        code = 2
        try:
            os.close(begins)  # so that it ends with the parent
            os.read(begin, 1)
            code = 0 if ask() else 1
        finally:
            os._exit(code)
    try:
        meanwhile()
    finally:
        os.write(begins, b"x")
        os.close(begins)
        os.close(begin)
        _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    assert code in {0, 1}
    return code == 0


def test_neither_sees_what_the_other_writes() -> None:
    segment = MappedSegment(1 << 16)
    tensor = segment.view(4096, 400).view(torch.float32)
    tensor.fill_(1)
    array = tensor.numpy()

    def ask() -> bool:
        is_copy = bool((tensor == 1).all()) and bool((array == 1).all())
        tensor.fill_(3)
        return is_copy and array[0] == 3 and not forked_memory.shares_with_parent()

    assert run_forked(ask, lambda: tensor.fill_(2))
    assert bool((tensor == 2).all())


def test_a_fork_of_a_fork_has_copies_too() -> None:
    segment = MappedSegment(4096)
    tensor = segment.view(0, 4)
    assert run_forked(lambda: run_forked(lambda: int(tensor[0]) == 0, lambda: tensor.fill_(5)), lambda: None)


def test_memory_that_was_never_written_is_not_allocated() -> None:
    segment = MappedSegment(8 << 20)
    segment.view(4 << 20, 4).fill_(1)
    before = os.fstat(segment.descriptor).st_blocks
    assert run_forked(lambda: int(segment.view(4 << 20, 4)[3]) == 1, lambda: None)
    assert os.fstat(segment.descriptor).st_blocks == before


def test_beyond_a_limit_it_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    segment = MappedSegment(4096)
    tensor = segment.view(0, 4)
    tensor.fill_(1)
    monkeypatch.setattr(forked_memory, "_LIMIT", 0)
    assert run_forked(lambda: int(tensor[0]) == 2 and forked_memory.shares_with_parent(), lambda: tensor.fill_(2))
    assert not forked_memory.shares_with_parent()


@pytest.mark.parametrize("is_copied", [True, False], ids=["copied", "shared"])
def test_a_forked_process_evaluates_the_model_as_it_was(
    is_copied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    GeminiCompiler().compiler(model, GeminiConfig(mode="pipeline", pipeline_degree=2, run_folder=str(tmp_path)))

    def train() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(model(torch.randn(6, 4)), torch.randint(2, (6,))).backward()
            optimizer.step()

    train()
    if not is_copied:
        monkeypatch.setattr(forked_memory, "_LIMIT", 0)
    x, weights = torch.ones(3, 4), [one.detach().clone() for one in model.parameters()]
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    expected = torch.tanh(torch.tanh(x @ weights[0].T + weights[1]) @ weights[2].T + weights[3]) @ weights[4].T

    def ask() -> bool:
        is_same = torch.allclose(model(x), expected + weights[5])
        for one, gradient in zip(model.parameters(), gradients, strict=True):
            is_same = is_same and one.grad is not None and torch.equal(one.grad, gradient)
            one.data.zero_()
        return is_same

    assert run_forked(ask, train) == is_copied
    assert (float(model[0].weight.detach().abs().sum()) > 0) == is_copied
    assert ("shares its parameters with the process that forked this one" in capfd.readouterr().err) != is_copied
