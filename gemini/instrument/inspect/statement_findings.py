"""Findings in statements: model classes and functions, training and evaluation loops, training steps.

A loop trains if an optimizer steps in it, or gradients are computed in it, or it calls a function that does one
training step. It evaluates if it calls the model and does not train. Nested loops:

    for epoch in …:                the innermost loop around a step is the training loop;
        for batch in …:            an inner loop that only accumulates gradients belongs to it
            …backward(), …step()
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from gemini.instrument.inspect.call_findings import Meaning, short_name
from gemini.instrument.inspect.name_evidence import Evidence, FileEvidence, own_nodes

Loop = ast.For | ast.AsyncFor | ast.While
Function = ast.FunctionDef | ast.AsyncFunctionDef
Named = tuple[ast.stmt, str, str]  # the node, its kind, its name

_EVALUATES = re.compile(r"(?i)(^|_)(eval|evaluate|evaluation|test|valid|validate|validation|predict|infer|inference)")
_STEP_METHODS = {"training_step": "train step", "train_step": "train step"}
_EVAL_METHODS = {"validation_step", "test_step", "predict_step"}
_TRAINS = {"backward", "step"}


def find_statements(evidence: Evidence, file: FileEvidence, found: Sequence[Meaning]) -> list[Named]:
    """Return the recognised classes, functions and loops of one file."""
    return [*_classes(evidence, file), *_Loops(evidence, file, found).all()]


def _classes(evidence: Evidence, file: FileEvidence) -> Iterator[Named]:
    for name, node in file.classes.items():
        kind = evidence.kind_of_class(name)
        if kind:
            yield node, kind, name


class _Loops:
    def __init__(self, evidence: Evidence, file: FileEvidence, found: Sequence[Meaning]) -> None:
        self.evidence = evidence
        self.file = file
        self.unit = file.unit
        self.found = found
        self.training: dict[Loop, None] = {}

    def all(self) -> Iterator[Named]:
        self._find_training_loops()
        steps = dict(self._train_steps())
        yield from ((node, "train step", name) for node, name in steps.items())
        self._find_loops_over_steps({node.name for node in steps})
        for loop in self.training:
            yield loop, "train loop", self._name(loop)
        for loop in self._evaluation_loops():
            yield loop, "eval loop", self._name(loop)
        yield from self._model_functions(set(steps))

    def _find_training_loops(self) -> None:
        for kind in ("step", "backward"):
            for meaning in self.found:
                loops = list(self._loops_around(meaning.node)) if meaning.kind == kind else []
                if loops and not any(loop in self.training for loop in loops) and self._runs(meaning):
                    self.training[loops[0]] = None

    def _runs(self, meaning: Meaning) -> bool:
        """Return whether a finding trains: graph construction such as `optimizer.minimize(loss)` does not."""
        return not meaning.name.endswith((".minimize", "tensorflow.gradients", ".compute_gradients"))

    def _train_steps(self) -> Iterator[tuple[Function, str]]:
        """Yield the functions that compute gradients or step outside of loops."""
        for name, node in self.file.functions.items():
            own = set(own_nodes(node))
            sites = [each for each in self.found if each.kind in _TRAINS and each.node in own and self._runs(each)]
            named = node.name in _STEP_METHODS and self._in_model_class(node)
            if named or (sites and not any(self._loops_around(site.node) for site in sites)):
                yield node, name

    def _find_loops_over_steps(self, names: set[str]) -> None:
        for call in self.unit.nodes(ast.Call):
            loops = self._loops_around(call) if self._called_name(call) in names else []
            if loops and not any(loop in self.training for loop in loops):
                self.training[loops[0]] = None

    def _called_name(self, call: ast.Call) -> str:
        """Return the name of the called function or method of self; `optimizer.step` is neither."""
        func = call.func
        if isinstance(func, ast.Name):
            return func.id
        if isinstance(func, ast.Attribute) and (self.file.resolve(func) or short_name(func.value) == "self"):
            return func.attr
        return ""

    def _evaluation_loops(self) -> Iterator[Loop]:
        seen: set[Loop] = set()
        for meaning in self.found:
            if meaning.kind != "forward":
                continue
            loops = self._loops_around(meaning.node)
            if not loops or any(loop in self.training or loop in seen for loop in loops):
                continue
            inside = set(ast.walk(loops[0]))
            trains = any(each.kind in _TRAINS and each.node in inside for each in self.found)
            if not trains and not (self._in_model_class(loops[0]) and not self._evaluates(loops[0])):
                seen.add(loops[0])
                yield loops[0]

    def _evaluates(self, node: ast.AST) -> bool:
        """Return whether the function around `node` evaluates, by its name or because it disables gradients."""
        function = self.unit.function(node)
        if not isinstance(function, Function):
            return False
        if _EVALUATES.search(function.name) or function.name in _EVAL_METHODS:
            return True
        quiet = {name for vocabulary in self.evidence.vocabularies for name in vocabulary.no_gradient}
        used = (self.file.resolve(each.func) for each in ast.walk(function) if isinstance(each, ast.Call))
        return any(name in quiet for name in used)

    def _model_functions(self, steps: set[Function]) -> Iterator[Named]:
        """Yield the functions that build a model, or are one: several layers or ops, and a result."""
        for name, node in self.file.functions.items():
            if node in steps or isinstance(self.unit.parent(node), ast.ClassDef):
                continue
            own = set(own_nodes(node))
            kinds = [each.kind for each in self.found if each.node in own]
            returns = any(isinstance(each, ast.Return) and each.value is not None for each in own)
            built = self.evidence.kind_of_call(name) == "model"
            computes = kinds.count("op") + kinds.count("layer") >= 2 and not _TRAINS.intersection(kinds)
            if returns and (built or (computes and "forward" not in kinds)) and not _EVALUATES.search(node.name):
                yield node, "model", name

    def _loops_around(self, node: ast.AST) -> list[Loop]:
        """Return the loops around `node` in the same function, innermost first."""
        loops: list[Loop] = []
        for around in self.unit.ancestors(node):
            if isinstance(around, Loop):
                loops.append(around)
            elif isinstance(around, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                break
        return loops

    def _in_model_class(self, node: ast.AST) -> bool:
        around = self.unit.class_(node)
        return any(
            known is around and self.evidence.kind_of_class(name) == "model"
            for name, known in self.file.classes.items()
        )

    def _name(self, loop: Loop) -> str:
        """Return the name of the function around the loop."""
        function = self.unit.function(loop)
        known = (name for name, node in self.file.functions.items() if node is function)
        return next(known, self.file.source.module or "module")
