"""Recognition of PyTorch programs: what is found where, in the many ways people write them."""

from __future__ import annotations

import textwrap

import pytest

from gemini.instrument.inspect import KINDS, Finding, recognise
from gemini.instrument.text.source_file import SourceFile


def found(text: str, **others: str) -> list[tuple[int, str, str]]:
    """(line, kind, name) of what is recognised in `text`, judged together with the modules in `others`."""
    sources = [SourceFile.from_text(textwrap.dedent(text).strip("\n"), "main.py", "main")]
    for name, other in others.items():
        sources.append(SourceFile.from_text(textwrap.dedent(other).strip("\n"), f"{name}.py", name.replace("__", ".")))
    return [(one.line, one.kind, one.name) for one in recognise(sources) if one.file == "main.py"]


def kinds(text: str, **others: str) -> list[tuple[int, str]]:
    return [(line, kind) for line, kind, _ in found(text, **others)]


PLAIN = """
import torch
import torch.nn.functional as F
from torch import nn as N
from torch.utils.data import DataLoader

class Net(N.Module):
    def __init__(self):
        super().__init__()
        self.fc = N.Linear(4, 2)
    def forward(self, x):
        return F.relu(self.fc(x))

def train(model, loader, optimizer):
    for x, y in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.cuda()), y)
        loss.backward()
        optimizer.step()

@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    for x, y in loader:
        out = model(x)

net = Net().to("cuda:0")
opt = torch.optim.Adam(net.parameters())
sched = torch.optim.lr_scheduler.StepLR(opt, 1)
loader = DataLoader(data)
torch.save(net.state_dict(), "net.pt")
net.load_state_dict(torch.load("net.pt"))
"""


def test_an_ordinary_script() -> None:
    assert found(PLAIN) == [
        (6, "model", "main.Net"),
        (9, "layer", "torch.nn.Linear"),
        (11, "op", "torch.nn.functional.relu"),
        (14, "train loop", "main.train"),
        (15, "zero grad", "optimizer.zero_grad"),
        (16, "loss", "torch.nn.functional.cross_entropy"),
        (16, "forward", "model"),
        (16, "device", "x.cuda"),
        (17, "backward", "loss.backward"),
        (18, "step", "optimizer.step"),
        (23, "eval loop", "main.evaluate"),
        (24, "forward", "model"),
        (26, "model", "main.Net"),
        (26, "device", "Net(…).to"),
        (27, "optimizer", "torch.optim.Adam"),
        (28, "scheduler", "torch.optim.lr_scheduler.StepLR"),
        (29, "data", "torch.utils.data.DataLoader"),
        (30, "checkpoint", "torch.save"),
        (31, "checkpoint", "net.load_state_dict"),
        (31, "checkpoint", "torch.load"),
    ]


def test_findings_carry_their_place_and_text() -> None:
    finding = next(one for one in recognise([SourceFile.from_text(PLAIN, "a.py", "a")]) if one.kind == "optimizer")
    assert finding == Finding(
        "a.py", 28, 6, 28, 40, "optimizer", "torch.optim.Adam", "torch.optim.Adam(net.parameters())"
    )
    assert finding.where == "a.py:28"
    assert finding.to_json()["end_column"] == 40


def test_a_local_variable_called_torch_is_not_torch() -> None:
    assert found("def f(torch, F):\n    return torch.nn.Linear(1, 1), F.relu(1), torch.save(2)\n") == []


def test_models_through_base_classes_in_other_files() -> None:
    text = """
    from models import Net as Mine
    import models.extra as extra
    class Bigger(Mine): ...
    class Other(extra.Base): ...
    class Plain(extra.Helper): ...
    net = Bigger()
    """
    others = {
        "models": "from .net import Net",
        "models__net": "from .base import *\nclass Net(Base): ...",
        "models__base": "import torch\nclass Base(torch.nn.Module): ...",
        "models__extra": "from models.base import Base\nclass Helper: ...",
    }
    sources = [SourceFile.from_text(textwrap.dedent(text).strip("\n"), "main.py", "main")]
    paths = {"models": "models/__init__.py", "models__net": "models/net.py", "models__base": "models/base.py"}
    paths["models__extra"] = "models/extra.py"
    for name, path in paths.items():
        sources.append(SourceFile.from_text(others[name], path, name.replace("__", ".")))
    result = [(one.line, one.kind) for one in recognise(sources) if one.file == "main.py"]
    assert result == [(3, "model"), (4, "model"), (6, "model")]


def test_a_training_step_in_a_function_and_the_loop_over_it() -> None:
    text = """
    import torch
    def train_step(model, batch, opt):
        loss = model(batch).sum()
        loss.backward()
        opt.step()
    def fit(model, batches, opt):
        for epoch in range(3):
            for batch in batches:
                train_step(model, batch, opt)
    """
    assert (2, "train step") in kinds(text)
    assert [line for line, kind in kinds(text) if kind == "train loop"] == [8]


def test_accumulation_belongs_to_the_loop_that_steps() -> None:
    text = """
    import torch
    for batch in batches:
        for micro in batch:
            model(micro).sum().backward()
        optimizer.step()
    """
    assert [line for line, kind in kinds(text) if kind == "train loop"] == [2]


def test_closures() -> None:
    text = """
    import torch
    def main():
        net = torch.nn.Sequential(torch.nn.Linear(1, 1))
        opt = torch.optim.LBFGS(net.parameters())
        def closure():
            loss = net(x).sum()
            loss.backward()
            return loss
        while True:
            opt.step(closure)
    """
    result = kinds(text)
    assert {(3, "model"), (5, "train step"), (6, "forward"), (7, "backward"), (9, "train loop"), (10, "step")} <= {
        *result
    }


def test_only_optimizers_step() -> None:
    text = """
    import torch
    env.step(action)
    opt_d.step()
    lr_scheduler.step()
    scaler.step(optimizer)
    """
    assert kinds(text) == [(3, "step"), (4, "scheduler"), (5, "step")]


def test_huggingface_trainer() -> None:
    text = """
    from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
    tok = AutoTokenizer.from_pretrained("gpt2")
    model = AutoModelForCausalLM.from_pretrained("gpt2")
    trainer = Trainer(model=model, args=TrainingArguments("out"))
    trainer.train()
    trainer.evaluate()
    trainer.save_model("out")
    """
    assert kinds(text) == [
        (3, "model"), (4, "trainer"), (5, "train loop"), (6, "eval loop"), (7, "checkpoint"),
    ]  # fmt: skip


@pytest.mark.parametrize("imported", ["import lightning.pytorch as pl", "import pytorch_lightning as pl"])
def test_lightning(imported: str) -> None:
    text = f"""
    {imported}
    import torch
    class Lit(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = torch.nn.Linear(1, 1)
        def training_step(self, batch, index):
            return torch.nn.functional.mse_loss(self.net(batch), self(batch))
        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())
    trainer = pl.Trainer()
    trainer.fit(Lit())
    """
    assert kinds(text) == [
        (3, "model"), (6, "layer"), (7, "train step"), (8, "loss"), (8, "forward"), (8, "forward"), (10, "optimizer"),
        (11, "trainer"), (12, "train loop"), (12, "model"),
    ]  # fmt: skip


def test_accelerate() -> None:
    text = """
    from accelerate import Accelerator
    import torch
    accelerator = Accelerator()
    model, optimizer = accelerator.prepare(model, optimizer)
    for batch in loader:
        outputs = model(**batch)
        loss = outputs.loss
        accelerator.backward(loss)
        optimizer.step()
    """
    assert kinds(text) == [
        (3, "trainer"), (4, "device"), (5, "train loop"), (6, "forward"), (7, "loss"), (8, "backward"), (9, "step"),
    ]  # fmt: skip


def test_model_functions() -> None:
    text = """
    import torch, torch.nn.functional as F
    def build(width):
        net = torch.nn.Sequential(torch.nn.Linear(1, width))
        return net
    def functional(x, w):
        h = F.relu(F.linear(x, w))
        return F.log_softmax(h)
    def load(path):
        return torch.load(path)
    model = build(3)
    """
    assert [(line, name) for line, kind, name in found(text) if kind == "model"] == [
        (2, "main.build"), (3, "torch.nn.Sequential"), (5, "main.functional"), (10, "main.build"),
    ]  # fmt: skip


def test_every_kind_has_its_own_colour() -> None:
    assert len({kind.colour for kind in KINDS.values()}) == len(KINDS)


def test_device_arguments() -> None:
    text = """
    import torch
    x = torch.zeros(3, device="cuda:0")
    y = torch.zeros(3, device=None, dtype=torch.int8)
    z = torch.nn.Linear(1, 1, device=args.device)
    w = torch.load(f, map_location="cpu")
    """
    assert [(line, name) for line, kind, name in found(text) if kind == "device"] == [
        (2, "torch.zeros(device=)"), (4, "torch.nn.Linear(device=)"), (5, "torch.load(map_location=)"),
    ]  # fmt: skip


def test_objects_of_other_modules() -> None:
    text = """
    from setup import net, optimizer, helper
    for x in data:
        loss = net(x).sum()
        loss.backward()
        optimizer.step()
        helper(x)
    """
    other = """
    import torch
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters())
    def helper(x): ...
    """
    assert kinds(text, setup=other) == [(2, "train loop"), (3, "forward"), (4, "backward"), (5, "step")]
