"""Marks backward passes, optimizer steps and calls of `forward` for the launcher.

    loss.backward()                              __gemini__.loss(loss).backward()
    opt.step()                                   __gemini__.step(opt).step()
    net.forward(x)                               __gemini__.called(net).forward(x)

A mark returns its argument and checks its type at run time, so the `env.step()` of a game has no effect. It wraps the
receiver, not the call: the script's calls keep their frames and their order. Calls of `forward` inside the `forward` of
a model stay as they are: they are parts of that model's call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import chain

from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.prefilter import is_inserted
from gemini.instrument.text.edits import Edit

_BACKWARD_FUNCTIONS = ("torch.autograd.backward",)


class TrainingSites(Pass):
    """The pass described above."""

    name = "training-sites"
    description = "mark backward passes, optimizer steps and calls of forward for the launcher"
    # A file may import torch through another module of the user, without its name.
    triggers = ("torch", ".backward(", ".parameters(", ".forward(", ".Module", "import *")

    def edits(self, unit: Unit) -> Iterator[Edit]:
        """Mark every site of the file."""
        for edit in chain(self._steps(unit), self._forward_calls(unit)):
            if not is_inserted(unit, edit.node):
                yield edit

    def _steps(self, unit: Unit) -> Iterator[Edit]:
        for call in unit.methods("backward", "step"):
            func = call.func
            assert isinstance(func, ast.Attribute)
            name = unit.resolve(func) or ""
            if name in _BACKWARD_FUNCTIONS and call.args and not isinstance(call.args[0], ast.Starred):
                yield _mark(call.args[0], "loss")
            elif not name.startswith("torch.") and not _is_super(func.value):
                yield _mark(func.value, "loss" if func.attr == "backward" else "step")

    def _forward_calls(self, unit: Unit) -> Iterator[Edit]:
        models = _model_classes(unit)
        for call in unit.methods("forward"):
            func = call.func
            assert isinstance(func, ast.Attribute)
            is_own = _is_super(func.value) or (unit.resolve(func) or "").startswith("torch.")
            if not is_own and not _is_in_forward(unit, call, models):
                yield Edit.wrap(func.value, "__gemini__.called(", ")", "a call of a model")


def _is_in_forward(unit: Unit, call: ast.Call, models: set[str]) -> bool:
    """Return whether the `forward` of a model makes the call."""
    around = unit.class_(call)
    if around is None or around.name not in models:
        return False
    return any(isinstance(one, ast.FunctionDef) and one.name == "forward" for one in unit.ancestors(call))


def _mark(node: ast.expr, kind: str) -> Edit:
    return Edit.wrap(node, f"__gemini__.{kind}(", ")", f"a {kind} site")


def _is_super(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def _model_classes(unit: Unit) -> set[str]:
    """Return the names of the file's classes that derive from `torch.nn` modules, directly or through each other."""
    models: set[str] = set()
    for node in unit.nodes(ast.ClassDef):
        for base in node.bases:
            name = unit.resolve(base) or (base.id if isinstance(base, ast.Name) else "")
            if name in models or name.startswith("torch.nn.") or name.endswith(".LightningModule"):
                models |= {node.name, f"{unit.source.module}.{node.name}"}
    return models
