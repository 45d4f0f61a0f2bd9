"""Health: branches that only ask whether all numbers of a value are finite.

    if not torch.isfinite(x).all():      every layer of some models asks so, of values that it has computed
        x = x.clamp(-largest, largest)

The answer is the same in every healthy step, so such a branch may be a guard though it needs the model's own results:
a run in which it comes out otherwise is made again by the model itself. What all of a batch's parts answer, the batch
answers too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gemini.ir.node import Node
from gemini.ir.pytree import Ref, refs
from gemini.ir.symint import Expr

_HEALTHY = {"isfinite": ("all", True), "isinf": ("any", False), "isnan": ("any", False)}


def asked_of(nodes: Sequence[Node], expr: Any, expected: Any) -> Ref | None:
    """The value of which a branch asks whether it is finite, and finds that it is; None for any other branch."""
    while isinstance(expr, Expr) and expr.op in ("bool", "item") and len(expr.operands) == 1:
        expr = expr.operands[0]
    if not isinstance(expr, Ref) or not isinstance(expected, bool):
        return None
    over = nodes[expr.node]
    given = list(refs(over.args))
    if over.kind != "op" or len(given) != 1 or any(True for _ in refs(over.kwargs)):
        return None
    asked = nodes[given[0].node]
    operands = list(refs(asked.args))
    wanted = _HEALTHY.get(_name(asked)) if asked.kind == "op" and len(operands) == 1 else None
    return operands[0] if wanted == (_name(over), expected) else None


def _name(node: Node) -> str:
    return node.target.rpartition(".")[2]
