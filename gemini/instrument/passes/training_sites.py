"""Marks the places a run time has to know: models, their calls by `forward`, optimizers, backward passes and steps.

    net = Net()                                  net = __gemini__.model(Net())
    opt = torch.optim.Adam(net.parameters())     opt = __gemini__.optimizer(torch.optim.Adam(
                                                           __gemini__.model(net).parameters()))
    loss.backward()                              __gemini__.loss(loss).backward()
    opt.step()                                   __gemini__.step(opt).step()
    net.forward(x)                               __gemini__.called(net).forward(x)

A mark returns what it is given and looks at it before noting anything, so a game's `env.step()` stays a game's. It
goes around the receiver, never around the call: the script's calls keep their own frames and their order. What a
model's own `forward` calls so is no call of the script's.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain

from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.existing_edits import is_inserted
from gemini.instrument.passes.name_spellings import last_word
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.text.edits import Edit

_NOT_OPTIMIZERS = frozenset({"torch.optim.Optimizer", "torch.optim.lr_scheduler", "torch.optim.swa_utils"})
_OPTIMIZERS = ("torch.optim.", "torch.distributed.optim.", "transformers.Adafactor", "bitsandbytes.optim.")
_BACKWARD_FUNCTIONS = ("torch.autograd.backward",)
_PARAMETERS = ("parameters", "named_parameters")


class TrainingSites(Pass):
    """See the module."""

    name = "training-sites"
    description = "mark models, optimizers, backward passes and optimizer steps for the run time"
    # A file may have torch from a module of the program's own, without saying its name.
    triggers = ("torch", ".backward(", ".parameters(", ".forward(", ".Module", "import *")

    def edits(self, unit: Unit) -> Iterator[Edit]:
        """Mark every site of the file."""
        classes = _own_classes(unit)
        sites = (self._optimizers(unit, classes), self._models(unit, classes), self._method_sites(unit))
        for edit in chain(*sites, self._called(unit, classes)):
            if not is_inserted(unit, edit.node):
                yield edit

    def _optimizers(self, unit: Unit, classes: dict[str, str]) -> Iterator[Edit]:
        renamed = {alias.asname for alias in unit.nodes(ast.alias) if alias.asname and alias.name[:1].isupper()}
        for call in unit.nodes(ast.Call):
            word = last_word(call.func)
            if not word[:1].isupper() and word not in renamed:
                continue  # a class, by all habit; resolving every call would cost more than parsing the file
            name = unit.resolve(call.func) or word
            if _is_optimizer(name) or classes.get(name) == "optimizer":
                yield _mark(call, "optimizer")
                yield from self._models_of(unit, call)

    def _models(self, unit: Unit, classes: dict[str, str]) -> Iterator[Edit]:
        """Instances of the file's own model classes, unless they are parts of another model."""
        for call in unit.nodes(ast.Call):
            if not isinstance(call.func, ast.Name) or classes.get(call.func.id) != "model":
                continue
            around = unit.class_(call)
            means = unit.resolve(call.func) or call.func.id
            if classes.get(means) == "model" and (around is None or classes.get(around.name) != "model"):
                yield _mark(call, "model")

    def _models_of(self, unit: Unit, optimizer: ast.Call) -> Iterator[Edit]:
        """The models whose parameters go to an optimizer: `net.parameters()` anywhere in its arguments."""
        for node in ast.walk(optimizer):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in _PARAMETERS
                and not (unit.resolve(node.func) or "").startswith("torch.")
            ):
                yield _mark(node.func.value, "model")

    def _method_sites(self, unit: Unit) -> Iterator[Edit]:
        for call in unit.methods("backward", "step"):
            func = call.func
            assert isinstance(func, ast.Attribute)
            name = unit.resolve(func) or ""
            if name in _BACKWARD_FUNCTIONS and call.args and not isinstance(call.args[0], ast.Starred):
                yield _mark(call.args[0], "loss")
            elif not name.startswith("torch.") and not _is_super(func.value):
                yield _mark(func.value, "loss" if func.attr == "backward" else "step")

    def _called(self, unit: Unit, classes: dict[str, str]) -> Iterator[Edit]:
        for call in unit.methods("forward"):
            func = call.func
            assert isinstance(func, ast.Attribute)
            is_own = _is_super(func.value) or (unit.resolve(func) or "").startswith("torch.")
            if not is_own and not _is_in_forward(unit, call, classes):
                yield Edit.wrap(func.value, "__gemini__.called(", ")", "a call of a model")


def _is_in_forward(unit: Unit, call: ast.Call, classes: dict[str, str]) -> bool:
    """Whether it is a model's own `forward` that makes a call."""
    around = unit.class_(call)
    if around is None or classes.get(around.name) != "model":
        return False
    return any(isinstance(one, ast.FunctionDef) and one.name == "forward" for one in unit.ancestors(call))


def _mark(node: ast.expr, kind: str) -> Edit:
    return Edit.wrap(node, f"__gemini__.{kind}(", ")", f"a {kind} site")


def _is_optimizer(name: str) -> bool:
    if not name.startswith(_OPTIMIZERS) or name in _NOT_OPTIMIZERS:
        return False
    return not any(name.startswith(f"{other}.") for other in _NOT_OPTIMIZERS) and name.rpartition(".")[2][:1].isupper()


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _own_classes(unit: Unit) -> dict[str, str]:
    """The file's classes that derive from torch's modules and optimizers, by name, directly or through each other."""
    kinds: dict[str, str] = {}
    for node in unit.nodes(ast.ClassDef):
        for base in node.bases:
            name = unit.resolve(base) or (base.id if isinstance(base, ast.Name) else "")
            kind = kinds.get(name) or _kind_of_base(name)
            if kind:
                kinds[node.name] = kinds[f"{unit.source.module}.{node.name}"] = kind
    return kinds


def _kind_of_base(name: str) -> str:
    if name.startswith("torch.nn."):
        return "model"
    if name.endswith(".LightningModule"):
        return "model"
    return "optimizer" if name.startswith("torch.optim.") and "lr_scheduler" not in name else ""
