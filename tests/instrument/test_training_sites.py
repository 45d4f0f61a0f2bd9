"""Training sites: what is marked, that nothing else changes, and that the marks find the real objects."""

from __future__ import annotations

import contextlib
import io
import textwrap
from collections.abc import Iterator

import pytest

from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.device_placement import DevicePlacement
from gemini.instrument.passes.training_sites import TrainingSites
from gemini.instrument.text.source_file import SourceFile
from gemini.launcher import script_api as managed

IMPORTS = "import torch, torch.nn as nn\nfrom torch import optim\nclass Net(nn.Module): ...\n"


@pytest.fixture(autouse=True)
def _no_sites() -> Iterator[None]:
    managed.forget()
    yield
    managed.forget()


def instrumented(text: str, *passes: type) -> str:
    manager = PassManager([one() for one in passes or (TrainingSites,)])
    done = manager.run(SourceFile.from_text(textwrap.dedent(text), "script.py", "__main__"))
    assert not done.failures, done.failures
    return done.text.replace("import gemini.managed as __gemini__; ", "")


REWRITES = [
    ("net = Net()", "net = __gemini__.model(Net())"),
    (
        "opt = optim.Adam(net.parameters(), lr=0.1)",
        "opt = __gemini__.optimizer(optim.Adam(__gemini__.model(net).parameters(), lr=0.1))",
    ),
    (
        "opt = torch.optim.SGD([{'params': a.parameters()}, {'params': self.b.parameters()}])",
        "opt = __gemini__.optimizer(torch.optim.SGD([{'params': __gemini__.model(a).parameters()}, "
        "{'params': __gemini__.model(self.b).parameters()}]))",
    ),
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


def test_parts_of_a_model_are_not_models() -> None:
    text = IMPORTS + "class Two(Net):\n    def __init__(self):\n        self.first = Net()\n"
    assert instrumented(text) == text


def test_methods_of_a_model_may_call_it_by_forward() -> None:
    text = IMPORTS + "class Two(Net):\n    def loss(self, x):\n        return {}.forward(x).sum()\n"
    assert instrumented(text.format("self")) == text.format("__gemini__.called(self)")


def test_what_a_forward_calls_by_forward_is_its_own() -> None:
    text = IMPORTS + "class Two(Net):\n    def forward(self, x):\n        return self.first.forward(x)\n"
    assert instrumented(text) == text
    text = IMPORTS + "class Agent(Base):\n    def act(self, x):\n        return super().forward(x)\n"
    assert instrumented(text) == text


def test_schedulers_are_not_optimizers() -> None:
    text = IMPORTS + "s = optim.lr_scheduler.StepLR(opt, 1)\n"
    assert instrumented(text) == text


def test_marks_stay_inside_of_placement() -> None:
    text = instrumented(IMPORTS + "net = Net().cuda()\n", TrainingSites, DevicePlacement)
    assert text.endswith("net = __gemini__.on(__gemini__.model(Net())).cuda()\n")


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


def test_the_program_is_the_same_and_its_sites_are_known() -> None:
    done = PassManager([TrainingSites()]).run(SourceFile.from_text(SCRIPT, "script.py", "__main__"))
    plain, _ = run(SCRIPT)
    marked, namespace = run(done.text)
    assert marked == plain
    assert {site.kind for site in managed.sites()} == {"model", "optimizer", "loss", "step"}
    assert [site.line for site in managed.sites() if site.kind == "step"] == [24]  # opt's, not the game's
    assert managed.marked("model") == (namespace["net"],)
    assert managed.marked("optimizer") == (namespace["opt"],)


def test_marks_keep_nothing_alive() -> None:
    _, namespace = run(PassManager([TrainingSites()]).run(SourceFile.from_text(SCRIPT, "s.py")).text)
    assert managed.marked("model")
    namespace.clear()
    assert managed.marked("model") == managed.marked("optimizer") == ()


def test_a_run_time_can_watch() -> None:
    seen: list[tuple[object, str]] = []
    stop = managed.watch(lambda value, site: seen.append((value, site.kind)))
    _, namespace = run(PassManager([TrainingSites()]).run(SourceFile.from_text(SCRIPT, "s.py")).text)
    stop()
    managed.model(namespace["net"])
    kinds = [kind for _, kind in seen]
    assert kinds == ["model", "model", "optimizer", *["loss", "step"] * 3]
    assert seen[0][0] is namespace["net"]


def test_values_that_are_no_ones_pass_through() -> None:
    for value in (None, 3, "text", object(), [1]):
        assert managed.model(value) is value
        assert managed.optimizer(value) is value
        assert managed.loss(value) is value
        assert managed.step(value) is value
    assert managed.sites() == ()


def test_instrumenting_again_changes_nothing() -> None:
    text = IMPORTS + "net = Net().cuda()\n" + "\n".join(before for before, _ in REWRITES) + "\n"
    text += "x = torch.zeros(1, device=d).to(d)\ntorch.cuda.synchronize()\ntorch.load(f)\ntorch.device('cuda', 0)\n"
    manager = PassManager([TrainingSites(), DevicePlacement()])
    once = manager.run(SourceFile.from_text(text, "script.py", "__main__"))
    assert once.changed
    assert manager.run(SourceFile.from_text(once.text, "script.py", "__main__")).text == once.text


def test_an_optimizer_without_weak_references_is_no_trouble() -> None:
    class Slim:
        __slots__ = ()

        def step(self) -> None: ...

        def zero_grad(self) -> None: ...

    slim = Slim()
    assert managed.step(slim) is slim
    assert [site.kind for site in managed.sites()] == ["step"]
    assert managed.marked("step") == ()
