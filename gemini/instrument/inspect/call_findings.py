"""Findings in calls: the kind of every call in a file.

A call of a qualified name is looked up in the vocabularies; a method call on a variable is classified by the name of
the method and the value of the variable; a call of a variable that holds a model is a forward pass.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from gemini.instrument.inspect.name_evidence import (
    Evidence,
    FileEvidence,
    is_called_like,
    is_device_name,
    last_name,
    strip_inserted_calls,
)

# Methods of a model class in which calls of sub-modules are part of the model, not a use of it.
_INSIDE = {"__init__", "forward", "call", "build", "__call__", "setup", "extra_repr"}


@dataclass(frozen=True)
class Meaning:
    """The kind of a node, and the name under which it is reported."""

    node: ast.expr
    kind: str
    name: str


def find_meanings(evidence: Evidence, file: FileEvidence) -> Iterator[Meaning]:
    """Yield the recognised calls, and a few attributes, of one file."""
    reader = _CallClassifier(evidence, file)
    for call in file.unit.nodes(ast.Call):
        found = reader.call(call)
        if found:
            yield Meaning(call, *found)
        if not found or found[0] != "device":
            yield from reader.device_arguments(call)
    for attribute in file.unit.nodes(ast.Attribute):
        if reader.is_loss_of_output(attribute):
            yield Meaning(attribute, "loss", short_name(attribute))


class _CallClassifier:
    def __init__(self, evidence: Evidence, file: FileEvidence) -> None:
        self.evidence = evidence
        self.file = file

    def call(self, call: ast.Call) -> tuple[str, str] | None:
        if strip_inserted_calls(call) is not call:
            return None  # inserted by a pass
        name = self.file.resolve(call.func)
        if name:
            kind = self.evidence.kind_of_call(name)
            if kind:
                return self._in_place(call, kind, name)
            if not self.evidence.may_be_users(name) and not isinstance(call.func, ast.Attribute):
                return None
        if isinstance(call.func, ast.Attribute):
            found = self._method(call, call.func)
            if found:
                return found
        return self._call_of_variable(call)

    def _in_place(self, call: ast.Call, kind: str, name: str) -> tuple[str, str]:
        """Return the kind in its context: a model inside a model class is a layer; a layer may be the whole model."""
        inside = self._model_class(call) is not None
        if kind == "model" and inside:
            return "layer", name
        if kind == "layer" and not inside and self._is_whole_model(call, name):
            return "model", name
        return kind, name

    def _is_whole_model(self, call: ast.Call, name: str) -> bool:
        """Return whether a layer is the script's model: assigned, and a container or named like a model."""
        node: ast.AST | None = self.file.unit.parent(call)
        # Up through .to(device), .cuda() and tuples, but not out of the arguments of another call.
        while isinstance(node, (ast.Attribute, ast.Tuple)) or (isinstance(node, ast.Call) and call not in node.args):
            node = self.file.unit.parent(node)
        if not isinstance(node, ast.Assign):
            return False
        return name == "torch.nn.Sequential" or any(
            is_called_like(name, "model") for target in node.targets if (name := last_name(target) or "")
        )

    def _method(self, call: ast.Call, func: ast.Attribute) -> tuple[str, str] | None:
        name = short_name(func)
        if func.attr == "step":
            return self._step(call, func, name)
        if func.attr == "run" and self._holds(func.value, "session") and not _initialises(call):
            return ("step", name) if self._runs_train_op(call) else ("forward", name)
        for vocabulary in self.evidence.vocabularies:
            rule = vocabulary.methods.get(func.attr)
            if rule and self._receiver_fits(call, func, rule[1]):
                return rule[0], name
        if func.attr == "forward" and self._is_model(func.value):
            return "forward", name
        return None

    def _receiver_fits(self, call: ast.Call, func: ast.Attribute, wanted: str) -> bool:
        if wanted == "any":
            return self.file.resolve(func.value) is None or isinstance(func.value, ast.Name)
        if wanted == "device":
            return any(self._is_device(value) for value in _values(call))
        if wanted == "class":  # a class of the program, or an unknown one
            owner = self.file.resolve(func.value)
            return owner is None or self.evidence.kind_of_class(owner) == "model"
        return any(self._holds(func.value, each) for each in wanted.split(" or "))

    def _step(self, call: ast.Call, func: ast.Attribute, name: str) -> tuple[str, str] | None:
        if self._holds(func.value, "scheduler"):
            return "scheduler", name
        if self._holds(func.value, "optimizer"):
            return "step", name
        # scaler.step(optimizer), engine.step(); not env.step(action)
        if any(self._holds(value, "optimizer") for value in call.args):
            return "step", name
        return None

    def _call_of_variable(self, call: ast.Call) -> tuple[str, str] | None:
        func = call.func
        if not isinstance(func, (ast.Name, ast.Attribute, ast.Subscript)):
            return None
        name = short_name(func)
        inside = self._model_class(call) is not None and self._method_name(call) in _INSIDE
        if isinstance(func, ast.Name) and func.id == "self" and not inside:
            return "forward", "self"
        if isinstance(func, ast.Attribute) and not _is_self(func.value):
            return None  # a method of another object; variables and self hold models
        if self._holds(func, "loss"):
            return "loss", name
        if not inside and self._is_model(func):
            return "forward", name
        return None

    def device_arguments(self, call: ast.Call) -> Iterator[Meaning]:
        """Yield the device arguments of a call: `torch.zeros(3, device="cuda")`."""
        for keyword in call.keywords:
            if keyword.arg in ("device", "map_location") and self._is_device(keyword.value):
                yield Meaning(keyword.value, "device", f"{short_name(call.func)}({keyword.arg}=)")

    def _is_model(self, expr: ast.expr) -> bool:
        name = self.file.resolve(expr)
        return (name is None or self.evidence.is_variable(name)) and self._holds(expr, "model")

    def is_loss_of_output(self, node: ast.Attribute) -> bool:
        """Return whether `node` is `outputs.loss`, as of the models of transformers."""
        if node.attr != "loss" or not isinstance(node.ctx, ast.Load):
            return False
        return isinstance(node.value, ast.Name) and node.value.id != "self" and "output" in node.value.id.lower()

    def _is_device(self, expr: ast.expr) -> bool:
        if isinstance(expr, ast.Constant):
            return isinstance(expr.value, str) and is_device_name(expr.value)
        if isinstance(expr, ast.Call):
            return self.evidence.kind_of_value(self.file, expr) == "device"
        if isinstance(expr, ast.JoinedStr):
            first = expr.values[0] if expr.values else None
            return isinstance(first, ast.Constant) and str(first.value).startswith(("cuda", "cpu"))
        return self.file.resolve(expr) is None and self._holds(expr, "device")

    def _runs_train_op(self, call: ast.Call) -> bool:
        for value in call.args[:1]:
            wanted = value.elts if isinstance(value, (ast.List, ast.Tuple)) else [value]
            if any(self._holds(each, "train op") for each in wanted):
                return True
        return False

    def _holds(self, expr: ast.expr, kind: str) -> bool:
        return self.evidence.holds(self.file, expr, kind)

    def _model_class(self, node: ast.AST) -> ast.ClassDef | None:
        around = self.file.unit.class_(node)
        for name, known in self.file.classes.items():
            if known is around and self.evidence.kind_of_class(name) == "model":
                return around
        return None

    def _method_name(self, node: ast.AST) -> str:
        for around in self.file.unit.ancestors(node):
            if isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef)):
                return around.name
        return ""


def short_name(expr: ast.expr) -> str:
    """Return a short name of an expression: `loss.backward`, `self.optimizer.step`, `….backward`."""
    expr = strip_inserted_calls(expr)
    if isinstance(expr, ast.Name):
        return expr.id
    if isinstance(expr, ast.Attribute):
        return f"{short_name(expr.value)}.{expr.attr}"
    if isinstance(expr, ast.Subscript):
        return f"{short_name(expr.value)}[…]"
    if isinstance(expr, ast.Call):
        return f"{short_name(expr.func)}(…)"
    return last_name(expr) or "…"


def _initialises(call: ast.Call) -> bool:
    """Return whether the call is `sess.run(tf.global_variables_initializer())`."""
    return bool(call.args) and isinstance(call.args[0], ast.Call) and "initializer" in short_name(call.args[0].func)


def _is_self(expr: ast.expr) -> bool:
    return isinstance(expr, ast.Name) and expr.id in ("self", "cls")


def _values(call: ast.Call) -> Iterator[ast.expr]:
    yield from call.args
    yield from (keyword.value for keyword in call.keywords if keyword.arg == "device")
