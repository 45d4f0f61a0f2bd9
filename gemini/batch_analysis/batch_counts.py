"""Batch counts: numbers in a model's Python that count samples, are equal in every micro-batch, or neither."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from math import prod
from typing import Any

from gemini.batch_analysis.batch_kinds import Replicate, SampleIndices, Shard, SortedRows
from gemini.batch_analysis.op_call import SAMPLES, DataNumber, SampleCount, TensorValue, UnknownNumber
from gemini.ir.pytree import refs
from gemini.ir.symint import ARITHMETIC, Expr

UNKNOWN = "how many rows were chosen"
_LINEAR = ("add", "sub")
_COMPARE = ("eq", "ne", "lt", "le", "gt", "ge", "bool")


def number_kind(expr: Any, values: Mapping[Hashable, TensorValue]) -> Any:
    """Return a plain fixed number, a `SampleCount`, `DataNumber` for one read from data, or `UnknownNumber`."""
    if not isinstance(expr, Expr):
        return expr
    if expr.op in ARITHMETIC:
        return _arithmetic(expr.op, [number_kind(part, values) for part in expr.operands])
    if expr.op == "call":
        given = [values[ref] for part in expr.operands[1:] for ref in refs(part)]
        return DataNumber() if all(value.is_constant for value in given) else UnknownNumber()
    return _read_kind(expr, values[expr.operands[0]])


def _read_kind(expr: Expr, value: TensorValue) -> Any:
    dim = _batch_dim(value)
    if expr.op == "size":
        at = expr.operands[1] % max(value.rank, 1)
        size = value.shape[at]
        if dim == UNKNOWN and at:
            return size
        return UnknownNumber() if isinstance(dim, str) else SampleCount(size) if at == dim else size
    if expr.op == "numel":
        count = 1
        for size in value.shape:
            count *= size
        return UnknownNumber() if isinstance(dim, str) else count if dim is None else SampleCount(count)
    return DataNumber() if isinstance(value.kind, Replicate) else UnknownNumber()


def _batch_dim(value: TensorValue) -> Any:
    if isinstance(value.kind, (Shard, SampleIndices)):
        return value.kind.dim
    if isinstance(value.kind, SortedRows) and not value.kind.entries:
        return UNKNOWN
    if isinstance(value.kind, SortedRows):
        return 0 if value.kind.role not in ("tally", "offsets") else None
    return None if not hasattr(value.kind, "reason") else value.sized


def _arithmetic(op: str, parts: list[Any]) -> Any:
    if any(isinstance(part, UnknownNumber) for part in parts):
        return UnknownNumber()
    counts = [isinstance(part, SampleCount) for part in parts]
    if not any(counts):
        return DataNumber() if any(isinstance(part, DataNumber) for part in parts) else ARITHMETIC[op](*parts)
    if any(isinstance(part, DataNumber) for part in parts):
        return UnknownNumber()
    plain = ARITHMETIC[op](*(int(part) if isinstance(part, SampleCount) else part for part in parts))
    rest = [part for part, count in zip(parts, counts, strict=True) if not count]
    if op in _COMPARE and all(part == 0 for part in rest):
        return plain  # the number of samples, which is not 0, cancels out
    if op == "neg" or (op in _LINEAR and all(counts)):
        return SampleCount(plain)
    if op in _LINEAR and 0 in rest:
        return SampleCount(plain) if op == "add" or counts[0] else UnknownNumber()
    if op == "mul" and counts.count(True) == 1 and isinstance(plain, int):
        return SampleCount(plain)
    if op in ("floordiv", "truediv"):
        return _quotient(op, parts, counts, plain)
    return UnknownNumber()


def _quotient(op: str, parts: list[Any], counts: list[bool], plain: Any) -> Any:
    if all(counts):
        return plain  # the number of samples cancels out
    exact = counts[0] and isinstance(parts[1], int) and parts[0] % parts[1] == 0
    return SampleCount(plain) if exact and op == "floordiv" else UnknownNumber()


def number_at(expr: Any, values: Mapping[Hashable, TensorValue], samples: int) -> Any:
    """Return the number for this number of samples; None for one read from data, or not determined by sizes."""
    if not isinstance(expr, Expr):
        return expr
    if expr.op in ARITHMETIC:
        parts = [number_at(part, values, samples) for part in expr.operands]
        return None if any(part is None for part in parts) else ARITHMETIC[expr.op](*parts)
    if expr.op not in ("size", "numel"):
        return None
    value = values[expr.operands[0]]
    dim = _batch_dim(value)
    if isinstance(dim, str):
        return None
    shape = [size // SAMPLES * samples if at == dim else size for at, size in enumerate(value.shape)]
    return prod(shape) if expr.op == "numel" else shape[expr.operands[1] % max(value.rank, 1)]
