"""Programs that look at the memory of a model in their own ways, trained with workers and without."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiCompiler, GeminiConfig
from gemini.runtime.interception import dispatch

WIDTH, CLASSES, STEPS = 8, 3, 7
State = dict[str, Any]


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(),
        nn.Linear(WIDTH, CLASSES),
    )  # fmt: skip


# ── what a program holds: made before training, used after each step, and compared at the end ──────────────────────
def hold_checkpoint(model: nn.Sequential) -> State:
    return {"model": model.state_dict()}


def hold_data(model: nn.Sequential) -> State:
    data = [one.data for one in model.parameters()]
    return {"data": data, "velocity": [torch.zeros_like(one) for one in data]}


def hold_flat_buffer(model: nn.Sequential) -> State:
    flat, begin = torch.cat([one.detach().reshape(-1) for one in model.parameters()]), 0
    for one in model.parameters():
        one.data = flat[begin : begin + one.numel()].view_as(one)
        begin += one.numel()
    return {"flat": flat}


def hold_statistics(model: nn.Sequential) -> State:
    return {"mean": model[3].running_mean, "part": model[3].running_var[1:3]}


def hold_teacher(model: nn.Sequential) -> State:
    teacher = copy.deepcopy(model)
    teacher[5].weight = model[5].weight
    teacher[0].weight.data = model[0].weight.data
    return {"teacher": teacher, "weights": [teacher[0].weight, teacher[5].weight]}


def hold_table(model: nn.Sequential) -> State:
    table = {name: value.detach().view(-1)[::2] for name, value in model.named_parameters()}
    return {"table": table, "keys": {value: name for name, value in table.items()}}


def hold_array(model: nn.Sequential) -> State:
    return {"array": model[5].weight.detach().numpy(), "tensor": model[5].weight}


def hold_capsule(model: nn.Sequential) -> State:
    return {"other": torch.from_dlpack(model[2].bias.detach()), "tensor": model[2].bias}


def tie_weights(model: nn.Sequential) -> State:
    model[2].weight.data = model[2].weight.data.T
    tied = nn.Linear(WIDTH, WIDTH)
    tied.weight = model[2].weight
    model[4] = nn.Sequential(nn.Tanh(), tied)
    return {"tied": tied.weight}


def update_data(held: State, model: nn.Sequential) -> None:
    """Momentum, on the memory that was noted before."""
    for data, velocity, one in zip(held["data"], held["velocity"], model.parameters()):
        velocity.mul_(0.9).add_(one.grad)
        data.sub_(velocity, alpha=0.05)


def scale_flat(held: State, _: nn.Sequential) -> None:
    held["flat"].mul_(0.99)


PROGRAMS: dict[str, tuple[Callable[[nn.Sequential], State], Callable[[State, nn.Sequential], None] | None]] = {
    "a checkpoint": (hold_checkpoint, None),
    "an optimizer of data": (hold_data, update_data),
    "a flat buffer": (hold_flat_buffer, scale_flat),
    "running statistics": (hold_statistics, None),
    "a teacher": (hold_teacher, None),
    "a table of views": (hold_table, None),
    "tied weights": (tie_weights, None),
    "an array": (hold_array, None),
    "a capsule": (hold_capsule, None),
}
STAYING = {"an array": "5.weight", "a capsule": "2.bias"}  # that hold an address, of which tensor


def flatten_state(value: Any) -> list[torch.Tensor]:
    if isinstance(value, dict):
        return [leaf for one in (*value, *value.values()) for leaf in flatten_state(one)]
    if isinstance(value, list):
        return [leaf for one in value for leaf in flatten_state(one)]
    if isinstance(value, nn.Module):
        return [*value.parameters()]
    return [] if isinstance(value, str) else [torch.as_tensor(value).detach().clone()]


def train(model: nn.Sequential, name: str, start: Callable[[nn.Sequential], Any]) -> list[torch.Tensor]:
    """Return the losses, what the program holds, and the model."""
    hold, update = PROGRAMS[name]
    held = hold(model)
    start(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    seen: list[torch.Tensor] = []
    for _ in range(STEPS):
        x, y = torch.randn(8, 6, generator=generator), torch.randint(CLASSES, (8,), generator=generator)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if "teacher" in held:
            with torch.no_grad():
                target = held["teacher"](x).square().mean()
            loss = loss + target
        loss.backward()
        if update is None or name != "an optimizer of data":
            optimizer.step()
        if update is not None:
            update(held, model)
        seen.append(loss.detach().clone())
    return [*seen, *flatten_state(held), *(one.detach().clone() for one in model.state_dict().values())]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GeminiConfig]:
    """A configuration whose workers live as long as the tests of this file."""
    made = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, run_folder=str(tmp_path_factory.mktemp("run"))
    )
    keeper = make()
    GeminiCompiler().compiler(keeper, made)
    yield made
    del keeper


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*PROGRAMS])
def test_aliases_are_those_of_a_run_without_workers(
    name: str, config: GeminiConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = train(make(), name, lambda _: None)
    model = make()
    found = train(model, name, lambda model: GeminiCompiler().compiler(model, config))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
    managed = dispatch.find_managed(model)
    assert managed is not None
    if name in STAYING:
        lines = [line for line in capfd.readouterr().err.splitlines() if "may hold its address" in line]
        assert lines
        assert all(f": {STAYING[name]}: its memory cannot be shared" in line for line in lines)
    else:
        assert managed.pipelined is not None
        assert managed.pipelined.steps


SCRIPT = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
for step in range(8):
    x, y = torch.randn(16, 6), torch.randint(3, (16,))
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
torch.save(checkpoint, "checkpoint.pt")
torch.save(model.state_dict(), "model.pt")
"""


def test_a_checkpoint_taken_before_the_loop_has_the_weights_after_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [str(Path(sys.executable).with_name("gemini_python")), "--pipeline-degree", "2", "train.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr
    assert "2 on 2 workers" in result.stderr
    checkpoint, model = torch.load(tmp_path / "checkpoint.pt")["model"], torch.load(tmp_path / "model.pt")
    assert {name: value.tolist() for name, value in checkpoint.items()} == {k: v.tolist() for k, v in model.items()}
