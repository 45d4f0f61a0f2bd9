"""A model that stays local has no overhead per step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import gemini
from gemini.launcher.script_api import training_marks
from tests.launcher.process.launching import GEMINI, run, script

TRAINS = """
import collections, json, sys
import torch
from torch import nn

device = torch.device("cpu")
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 10)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
x, y = torch.randn(8, 8), torch.randint(0, 10, (8,))
calls = collections.Counter()

def note(frame, event, _):
    if event == "call" and "gemini" in frame.f_globals.get("__name__", ""):
        calls[frame.f_code.co_name] += 1

for step in range(20):
    if step == 10:
        sys.setprofile(note)
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
sys.setprofile(None)
print(json.dumps(calls))
"""


def test_only_two_empty_functions_are_called_in_a_step(tmp_path: Path) -> None:
    outcome = run(GEMINI, script("stays", TRAINS), tmp_path / "run")
    assert outcome.code == 0, outcome.stderr
    assert "runs as under python" in outcome.stderr
    assert json.loads(outcome.stdout) == {training_marks.identity.__name__: 2 * 10}


def test_no_thread_gets_a_stack_of_transforms_that_it_does_not_have() -> None:
    """To look at the stack of `torch.func` makes one, which torch then copies with every node of autograd: 2 % a step.

    `torch._C._are_functorch_transforms_active` tells as much and makes none.
    """
    sources = Path(gemini.__file__).parent.rglob("*.py")
    found = [path.name for path in sources if re.search(r"_functorch\.\w*(stack|level)", path.read_text("utf-8"))]
    assert found == []
