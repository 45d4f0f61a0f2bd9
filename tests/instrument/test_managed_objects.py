"""Managed objects: which constructions are wrapped, and that nothing else changes."""

from __future__ import annotations

import gc
import textwrap

import pytest
import torch
from torch import nn

from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.managed_objects import ManagedObjects
from gemini.instrument.text.source_file import SourceFile
from gemini.launcher import script_api
from gemini.launcher.model_discovery import ModelDiscovery
from gemini.launcher.script_api import construction_sites

IMPORTS = "import torch\nfrom torch import optim\n"


def instrumented(text: str) -> str:
    done = PassManager([ManagedObjects()]).run(SourceFile.from_text(textwrap.dedent(text), "script.py", "__main__"))
    assert not done.failures, done.failures
    return done.text.replace("import gemini.managed as __gemini__; ", "")


REWRITES = [
    (
        "net = Net()  # mine\nopt = optim.SGD(net.parameters(), lr=0.1)",
        "net = __gemini__.model(Net())  # mine\nopt = __gemini__.optimizer(optim.SGD(net.parameters(), lr=0.1))",
    ),
    (
        "a, b = A(), B()\nopts = [torch.optim.Adam(one.parameters()) for one in (a, b)]",
        "a, b = A(), B()\nopts = [__gemini__.optimizer(torch.optim.Adam(one.parameters())) for one in (a, b)]",
    ),
    (
        "g = make(4)\nopt = optim.AdamW([{'params': g.parameters()}])",
        "g = __gemini__.model(make(4))\nopt = __gemini__.optimizer(optim.AdamW([{'params': g.parameters()}]))",
    ),
    ("s = optim.lr_scheduler.StepLR(o, 1)\nn = sum(p.numel() for p in m.parameters())", None),
    (
        "def f(net):\n    return optim.SGD(net.parameters())",
        "def f(net):\n    return __gemini__.optimizer(optim.SGD(net.parameters()))",
    ),
    ("class Mine(optim.Optimizer): ...\nopt = Mine(net.parameters())", None),
]  # fmt: skip


@pytest.mark.parametrize(("before", "after"), REWRITES)
def test_constructions_are_wrapped(before: str, after: str | None) -> None:
    assert instrumented(IMPORTS + before + "\n") == IMPORTS + (after or before) + "\n"


def test_instrumented_source_is_not_wrapped_again() -> None:
    once = instrumented(IMPORTS + "net = Net()\nopt = optim.SGD(net.parameters())\n")
    assert instrumented(once) == once


def test_a_discovery_knows_where_a_model_and_its_optimizer_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(construction_sites, "_handlers", [])
    assert script_api.model(5) == 5
    found = ModelDiscovery(policy=None)  # type: ignore[arg-type]
    construction_sites.on_construction(found.register_place)
    net, other = script_api.model(nn.Linear(2, 2)), script_api.model(nn.Linear(2, 2))
    opt = script_api.optimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    assert set(found.places_of(net)) == {"model", "optimizer"}
    assert found.places_of(net)["model"].startswith(f"{__file__}:")
    assert set(found.places_of(other)) == {"model"}
    del net, opt
    gc.collect()
    assert len(found._places) == 1
