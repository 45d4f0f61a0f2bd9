"""Op letters: what a rule states of an op, one letter per dimension, and the way that follows from it.

    MatMul       "ab", "bc" → "ac"       divided along a: rows of the result; along b: results that add up
    Transpose    "abc", None → "acb"     None: the input is taken whole
    Pad          "a.", None → "a."       a dot: nothing divides along this dimension

A letter that no result has must be one of `sums`, otherwise the op cannot be divided along it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini.tensorflow.piece_layouts import PARTIAL, REPLICATE, Layout, Partial, Shard
from gemini.tensorflow.split_way import ForwardOp, Rule, Way, along, first_shard

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
WHOLE = "whole"
_Attributes = Mapping[str, Any]


@dataclass(frozen=True)
class Letters:
    """The letters of all inputs and results."""

    inputs: tuple[str | None, ...]
    outputs: tuple[str, ...]
    sums: str = ""
    """Letters along which the results of pieces add up."""
    linear: tuple[int, ...] = ()
    """Inputs of which the op passes a sum on, as the others are whole."""
    adds: bool = False
    """Whether the op adds its inputs, which may all be sums."""
    more: _Attributes = field(default_factory=dict)
    """How the op differs on pieces of its result, as arguments of `Way`."""
    summed: _Attributes = field(default_factory=dict)
    """How it differs where its results add up."""


def by_letters(letters_of: Callable[[ForwardOp], Letters | None]) -> Rule:
    """Return the rule of ops whose letters a function returns; None where they are unknown."""

    def rule(op: ForwardOp, layouts: Sequence[Layout]) -> Way | None:
        letters = letters_of(op)
        return None if letters is None else divide_op(op, letters, layouts)

    rule.__doc__ = letters_of.__doc__
    return rule


def divide_op(op: ForwardOp, letters: Letters, layouts: Sequence[Layout]) -> Way | None:
    """Return the way along the first divided input, or of a sum; None: the op takes whole inputs."""
    partial = [at for at, layout in enumerate(layouts) if isinstance(layout, Partial)]
    if partial and letters.adds and len(partial) == len(layouts):
        return Way(tuple(layouts), (PARTIAL,))
    found = first_shard(layouts)
    if found is None and partial:
        is_linear = partial[0] in letters.linear and (len(partial) == 1 or not letters.sums)
        return along(layouts, partial[0], op, PARTIAL) if is_linear else None
    if found is None or (dims := letters.inputs[found[0]]) is None or found[1].dim >= len(dims):
        return None
    letter, layout = dims[found[1].dim], found[1]
    if letter == "." or any(one.count(letter) > 1 for one in (*letters.inputs, *letters.outputs) if one):
        return None
    inputs = tuple(
        _place(one, letter, layout) if one and _is_long(shape, one.find(letter)) else REPLICATE
        for one, shape in zip(letters.inputs, op.in_shapes, strict=True)
    )
    if letter in letters.sums and not any(letter in one for one in letters.outputs):
        return Way(inputs, (PARTIAL,) * len(letters.outputs), **letters.summed)
    if not all(letter in one for one in letters.outputs):
        return None
    return Way(inputs, tuple(_place(one, letter, layout) for one in letters.outputs), **letters.more)


def _is_long(shape: Sequence[int] | None, dim: int) -> bool:
    """Whether a dimension has more than one entry, which would be that of all pieces."""
    return shape is not None and dim >= 0 and shape[dim] != 1


def _place(dims: str, letter: str, layout: Shard) -> Shard:
    return Shard(dims.index(letter), layout.factor, layout.outer)


# ── letters of common forms ────────────────────────────────────────────────────────────────────────────────────────
def name_dims(op: ForwardOp, at: int = 0) -> str | None:
    """Return a letter per dimension of an input; None where its rank is unknown."""
    rank = op.rank(at)
    return None if rank is None else ALPHABET[:rank]


def keep(op: ForwardOp, at: int, result: str, dims: str = "", **more: Any) -> Letters:
    """Return the letters of an op that maps one input, by default of letters in order, and takes the others whole."""
    dims = dims or (name_dims(op, at) or "")
    inputs = tuple(dims if one == at else None for one in range(len(op.inputs)))
    return Letters(inputs, (result,) * len(op.outputs), **more)


def without(dims: str, gone: Sequence[int] | set[int], blank: str = "") -> str:
    """Return letters without those of some dimensions, or with a blank in their place."""
    places = {one % len(dims) for one in gone} if dims else set()
    return "".join(blank if at in places else letter for at, letter in enumerate(dims))


def align(rank: int, size: int) -> str:
    """Return the letters of a tensor of this rank that broadcasts to `size` dimensions."""
    return ALPHABET[size - rank : size]
