"""Meta values: the contents of meta tensors that the model's Python branches on.

A model without weights cannot evaluate `mask.all()`. Where the tensor depends on sizes and inputs alone, the ops that
made it run on the CPU, with inputs of ones: an attention mask that masks nothing, no padding. The guard of the branch
records this assumption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gemini.ir.encode import decode, follow
from gemini.ir.node import Node
from gemini.ir.op_targets import find_op
from gemini.ir.pytree import Number, Ref
from gemini.ir.symint import evaluate


class NoMetaValue(Exception):
    """A tensor depends on weights."""


def compute_on_cpu(nodes: Sequence[Node], ref: Ref, made: dict[int, Any] | None = None) -> Any:
    """Return the value that a meta tensor would have on the CPU."""
    made = {} if made is None else made
    if ref.node not in made:
        made[ref.node] = _compute(nodes, nodes[ref.node], made)
    return follow(made[ref.node], ref.path)


def _compute(nodes: Sequence[Node], node: Node, made: dict[int, Any]) -> Any:
    if node.kind == "input":
        meta = node.outputs["ret", ()]
        return torch.ones(meta.shape, dtype=getattr(torch, meta.dtype))
    if node.kind != "op":
        raise NoMetaValue(node.name)

    def read(form: Any) -> Any:
        if isinstance(form, Ref):
            return compute_on_cpu(nodes, form, made)
        if isinstance(form, Number):
            return evaluate(form.expr, size)
        raise NoMetaValue(node.name)

    def size(expr: Any) -> Any:
        meta = nodes[expr.operands[0].node].outputs[expr.operands[0].source, expr.operands[0].path]
        if expr.op == "size":
            return meta.shape[expr.operands[1]]
        if expr.op == "numel":
            return meta.numel
        raise NoMetaValue(node.name)

    args, kwargs = _on_cpu(decode(node.args, read)), _on_cpu(decode(node.kwargs, read))
    with torch.device("cpu"):
        return find_op(node.target)(*args, **kwargs)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.device) or (isinstance(value, str) and value == "meta"):
        return torch.device("cpu")
    if type(value) in (list, tuple):
        return type(value)(_on_cpu(part) for part in value)
    if type(value) is dict:
        return {key: _on_cpu(part) for key, part in value.items()}
    return value
