"""Rule registry: from the name of an op, as graphs and tapes record it, to its rule.

A rule gets an `OpCall` with at least one argument that varies with the batch, and returns the kind of its results (one
for all, or a list), or raises `AnalysisRefused`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence

from gemini.batch_analysis.batch_kinds import Kind
from gemini.batch_analysis.op_call import OpCall

Rule = Callable[[OpCall], Kind | Sequence[Kind]]
RULES: dict[str, Rule] = {}
COUNTING: set[str] = set()  # rules that handle numbers which count samples
_PARTS = (
    "pointwise", "linear_ops", "reductions", "shape_ops", "reshape", "index_ops", "matmul", "dimwise", "nn_functions",
    "factories", "loss_ops", "mask_selection",
)  # fmt: skip
_ALIASES = {
    "radd": "add", "iadd": "add", "isub": "sub", "imul": "mul", "rmul": "mul", "truediv": "div", "itruediv": "div",
    "rtruediv": "rdiv", "floordiv": "floor_divide", "rfloordiv": "rfloor_divide", "true_divide": "div", "divide": "div",
    "multiply": "mul", "subtract": "sub", "negative": "neg", "absolute": "abs", "rpow": "pow", "ipow": "pow",
    "and": "logical_and", "iand": "logical_and", "rand_": "logical_and", "or": "logical_or", "ior": "logical_or",
    "ror": "logical_or", "xor": "logical_xor", "ixor": "logical_xor", "rxor": "logical_xor", "invert": "logical_not",
    "mod": "remainder", "rmod": "remainder", "imod": "remainder", "rmatmul": "rmatmul", "imatmul": "matmul",
    "concat": "cat", "concatenate": "cat", "swapaxes": "transpose", "swapdims": "transpose", "moveaxis": "movedim",
    "clip": "clamp", "greater": "gt", "greater_equal": "ge", "less": "lt", "less_equal": "le", "not_equal": "ne",
    "_softmax": "softmax", "_log_softmax": "log_softmax", "rrsub": "rsub", "hardtanh": "hardtanh", "ravel": "flatten",
}  # fmt: skip


def rule(*names: str, counts: bool = False) -> Callable[[Rule], Rule]:
    """Register a rule for ops of these names; `counts`: it handles numbers that count samples."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
            if counts:
                COUNTING.add(name)
        return function

    return register


def short_name(target: str) -> str:
    """Return the name under which rules are registered: without namespace and underscores."""
    parts = target.split(".")
    if parts[-1] == "__get__":
        return f"get_{parts[-2]}"
    if target.startswith("torch.ops.") and len(parts) >= 4:
        name = parts[3]
    else:
        name = parts[-1]
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        name = "rand_" if name == "rand" else name
    elif name.endswith("_") and not name.startswith("_"):
        name = name[:-1]
    name = _ALIASES.get(name, name)
    if ".fft." in target:
        return f"fft_{name}"
    return f"linalg_{name}" if ".linalg." in target else name


def find_rule(name: str) -> Rule | None:
    """Return the rule of a short name."""
    _load()
    return RULES.get(name)


@functools.cache
def _load() -> None:
    """Import all modules of rules, once."""
    for part in _PARTS:
        importlib.import_module(f"gemini.batch_analysis.rules.{part}")
