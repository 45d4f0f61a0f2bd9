"""Training sites: which expressions are marked, that nothing else changes, and that the marks detect training."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Iterator

import pytest

import gemini.managed
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.device_placement import DevicePlacement
from gemini.instrument.passes.training_sites import TrainingSites
from gemini.instrument.text.source_file import SourceFile
from gemini.launcher import script_api as managed
from gemini.launcher.script_api import training_marks

IMPORTS = "import torch, torch.nn as nn\nfrom torch import optim\nclass Net(nn.Module): ...\n"


@pytest.fixture(autouse=True)
def _no_handler() -> Iterator[None]:
    before = managed.loss, managed.step
    yield
    managed.loss, managed.step = before


def instrumented(text: str, *passes: type) -> str:
    manager = PassManager([one() for one in passes or (TrainingSites,)])
    done = manager.run(SourceFile.from_text(textwrap.dedent(text), "script.py", "__main__"))
    assert not done.failures, done.failures
    return done.text.replace("import gemini.managed as __gemini__; ", "")


REWRITES = [
    ("net = Net()", "net = Net()"),
    ("opt = optim.Adam(net.parameters(), lr=0.1)", "opt = optim.Adam(net.parameters(), lr=0.1)"),
    ("loss.backward()", "__gemini__.loss(loss).backward()"),
    ("(loss / 4).backward(retain_graph=True)", "(__gemini__.loss(loss / 4)).backward(retain_graph=True)"),
    ("scaler.scale(loss).backward()", "__gemini__.loss(scaler.scale(loss)).backward()"),
    ("(loss := f(x)).backward()", "(__gemini__.loss((loss := f(x)))).backward()"),
    ("torch.autograd.backward(loss)", "torch.autograd.backward(__gemini__.loss(loss))"),
    ("opt.step()", "__gemini__.step(opt).step()"),
    ("scaler.step(opt)", "__gemini__.step(scaler).step(opt)"),
    ("self.opts[0].step(closure)", "__gemini__.step(self.opts[0]).step(closure)"),
    ("y = agents[0].net.forward(x)", "y = __gemini__.called(agents[0].net).forward(x)"),
    ("nn.Linear.forward(layer, x)", "nn.Linear.forward(layer, x)"),
]


@pytest.mark.parametrize(("before", "after"), REWRITES)
def test_marks(before: str, after: str) -> None:
    assert instrumented(IMPORTS + before + "\n") == IMPORTS + after + "\n"


def test_methods_of_a_model_may_call_it_by_forward() -> None:
    text = IMPORTS + "class Two(Net):\n    def loss(self, x):\n        return {}.forward(x).sum()\n"
    assert instrumented(text.format("self")) == text.format("__gemini__.called(self)")


def test_what_a_forward_calls_by_forward_is_its_own() -> None:
    text = IMPORTS + "class Two(Net):\n    def forward(self, x):\n        return self.first.forward(x)\n"
    assert instrumented(text) == text
    text = IMPORTS + "class Agent(Base):\n    def act(self, x):\n        return super().forward(x)\n"
    assert instrumented(text) == text


def test_marks_stay_inside_of_placement() -> None:
    text = instrumented(IMPORTS + "y = net.forward(x).cuda()\nnet.cuda().forward(x)\n", TrainingSites, DevicePlacement)
    assert text.endswith(
        "y = __gemini__.on(__gemini__.called(net).forward(x)).cuda()\n"
        "__gemini__.called(__gemini__.on(net).cuda()).forward(x)\n"
    )


SCRIPT = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 1)
    def forward(self, x):
        return self.fc(x)

class Game:
    def step(self):
        return "game"

net = Net()
opt = torch.optim.SGD(net.parameters(), lr=0.1)
game = Game()
for _ in range(3):
    loss = net(torch.ones(1, 2)).sum()
    opt.zero_grad()
    loss.backward()
    opt.step()
    print(game.step(), round(loss.item(), 6))
"""


def run(text: str) -> tuple[str, dict[str, object]]:
    said, namespace = io.StringIO(), {"__name__": "__main__"}
    with contextlib.redirect_stdout(said):
        exec(compile("import torch; torch.manual_seed(0)\n" + text, "script.py", "exec"), namespace)
    return said.getvalue(), namespace


def test_the_program_is_the_same_and_its_first_step_is_reported_once() -> None:
    calls: list[str] = []
    training_marks.on_first_step(lambda: calls.append("trains"))
    done = PassManager([TrainingSites()]).run(SourceFile.from_text(SCRIPT, "script.py", "__main__"))
    plain, _ = run(SCRIPT)
    assert calls == []
    marked, _ = run(done.text)
    assert marked == plain
    assert calls == ["trains"]


@pytest.mark.parametrize("mark", ["loss", "step"])
def test_values_of_other_types_are_not_reported(mark: str) -> None:
    calls: list[str] = []
    training_marks.on_first_step(lambda: calls.append(mark))
    for value in (None, 3, "text", object(), [1]):
        assert getattr(managed, mark)(value) is value
    assert calls == []


@pytest.mark.parametrize("name", ["model", "optimizer", "loss", "step"])
def test_marks_of_dumps_by_earlier_versions_return_their_argument(name: str) -> None:
    value = object()
    assert getattr(gemini.managed, name)(value) is value


def test_instrumenting_again_changes_nothing() -> None:
    text = IMPORTS + "net = Net().cuda()\n" + "\n".join(before for before, _ in REWRITES) + "\n"
    text += "x = torch.zeros(1, device=d).to(d)\ntorch.cuda.synchronize()\ntorch.load(f)\ntorch.device('cuda', 0)\n"
    manager = PassManager([TrainingSites(), DevicePlacement()])
    once = manager.run(SourceFile.from_text(text, "script.py", "__main__"))
    assert once.changed
    assert manager.run(SourceFile.from_text(once.text, "script.py", "__main__")).text == once.text


def test_a_wrapper_of_an_optimizer_is_reported() -> None:
    class Slim:
        __slots__ = ()

        def step(self) -> None: ...

        def zero_grad(self) -> None: ...

    calls: list[str] = []
    training_marks.on_first_step(lambda: calls.append("trains"))
    slim = Slim()
    assert managed.step(slim) is slim
    assert calls == ["trains"]
