"""Places models and optimizers under management, where a file makes them.

    net = Net(width)                              net = __gemini__.model(Net(width))
    opt = torch.optim.SGD(net.parameters())       opt = __gemini__.optimizer(torch.optim.SGD(net.parameters()))

An optimizer is a call of a class of `torch.optim`; a model is what the name stood for whose `parameters()` an optimizer
receives. Both functions return their argument. In a run they register it with the place where it was made: the
parameters of an optimizer are trained, and summaries name the place of a model.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.prefilter import is_inserted
from gemini.instrument.text.edits import Edit

_READERS = ("parameters", "named_parameters")


class ManagedObjects(Pass):
    """The pass described above."""

    name = "managed-objects"
    description = "place models and optimizers under management where they are made"
    triggers = (".parameters(", ".named_parameters(")

    def edits(self, unit: Unit) -> Iterator[Edit]:
        """Wrap every optimizer of the file, and the models that these train."""
        optimizers = [call for call, name in unit.call_names.items() if _is_optimizer(name)]
        for call in optimizers:
            if not is_inserted(unit, call):
                yield Edit.wrap(call, "__gemini__.optimizer(", ")", "an optimizer")
        for value in _find_models(unit, optimizers):
            if not is_inserted(unit, value):
                yield Edit.wrap(value, "__gemini__.model(", ")", "a model")


def _is_optimizer(name: str) -> bool:
    """Return whether a qualified name is that of a class in `torch.optim`: `SGD`, not `lr_scheduler.StepLR`."""
    package, _, last = name.rpartition(".")
    return package == "torch.optim" and last[:1].isupper() and last != "Optimizer"


def _find_models(unit: Unit, optimizers: list[ast.Call]) -> list[ast.Call]:
    """Return the calls whose results the optimizers train, by assignments to their names in the same function."""
    found: dict[ast.Call, None] = {}
    assignments = unit.nodes(ast.Assign)
    for optimizer in optimizers:
        names = _trained_names(optimizer)
        scope = unit.function(optimizer)
        for one in assignments:
            target = one.targets[0]
            is_named = len(one.targets) == 1 and isinstance(target, ast.Name) and target.id in names
            is_before = one.lineno < optimizer.lineno and unit.function(one) is scope
            if is_named and is_before and isinstance(one.value, ast.Call):
                found[one.value] = None
    return list(found)


def _trained_names(optimizer: ast.Call) -> set[str]:
    """Return the names whose `parameters()` are among the arguments of an optimizer."""
    return {
        node.func.value.id
        for argument in (*optimizer.args, *(keyword.value for keyword in optimizer.keywords))
        for node in ast.walk(argument)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in _READERS
        and isinstance(node.func.value, ast.Name)
    }
