"""Lets `type(x)` see through deferred tensors.

    type(out) is torch.Tensor                    __gemini__.type_of(out) is torch.Tensor
    handlers[type(out)](out)                     handlers[__gemini__.type_of(out)](out)
    type(out)(values)                            __gemini__.type_of(out)(values)

`__gemini__.type_of` is the builtin `type` until a model of the program runs in workers; then its calls may return
tensors of another class than `torch.Tensor`, which `type` would show. Only calls of the builtin with one argument are
changed: not `type` as a value (`map(type, values)`), nor one that the file binds itself.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from gemini.instrument.passes.base import Pass
from gemini.instrument.passes.pass_input import Unit
from gemini.instrument.passes.prefilter import find_mentions, is_inserted
from gemini.instrument.text.edits import Edit


class TensorTypes(Pass):
    """The pass described above."""

    name = "tensor-types"
    description = "let type(x) see through deferred tensors"
    # A file may import torch through another module of the user, without its name.
    triggers = ("torch", ".backward(", ".parameters(", ".forward(", ".Module", "import *")

    def edits(self, unit: Unit) -> Iterator[Edit]:
        """Replace the function of every such call."""
        if "type" not in unit.text:
            return
        for node in find_mentions(unit, {"type"}):
            call = unit.parent(node)
            if _is_query(call, node) and unit.resolve(node) == "builtins.type" and not is_inserted(unit, node):
                yield Edit.replace(node, "__gemini__.type_of", "the type of the tensor that a deferred one stands for")


def _is_query(call: ast.AST | None, function: ast.AST) -> bool:
    """Return whether `call` calls the function with one positional argument."""
    return (
        isinstance(call, ast.Call)
        and call.func is function
        and len(call.args) == 1
        and not isinstance(call.args[0], ast.Starred)
        and not call.keywords
    )
