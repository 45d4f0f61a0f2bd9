"""Split way: how one op of the forward part runs on pieces, and the facts that its rule may use.

A rule takes the facts of an op and the layouts of its inputs, and returns a way or None: then the op takes the whole
tensors and runs once. Rules know forward ops only; TensorFlow differentiates the result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gemini.tensorflow.piece_layouts import REPLICATE, Layout, Shape, Shard


@dataclass(frozen=True)
class ForwardOp:
    """An op of the forward part, with the shapes of the whole batch; None where a shape or a value is unknown."""

    name: str
    type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    in_shapes: tuple[Shape | None, ...]
    out_shapes: tuple[Shape | None, ...]
    values: tuple[Any, ...]  # of inputs that depend on shapes and constants alone
    attributes: Any = field(compare=False)  # of the node: a map of AttrValue
    controls: tuple[str, ...] = ()
    is_stateful: bool = False
    inner: tuple[str, ...] = ()  # the types of the stateful ops in its functions

    def flag(self, name: str) -> bool:
        """Return a boolean attribute."""
        return bool(self.attributes[name].b)

    def text(self, name: str) -> str:
        """Return a string attribute."""
        return str(self.attributes[name].s.decode())

    def number(self, name: str) -> int:
        """Return an integer attribute."""
        return int(self.attributes[name].i)

    def rank(self, at: int) -> int | None:
        """Return the rank of an input."""
        shape = self.in_shapes[at]
        return None if shape is None else len(shape)


@dataclass(frozen=True)
class Way:
    """Layouts of all inputs and outputs, and how the op on a piece differs from the op."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    type: str = ""  # another op on the pieces
    scale: float = 1.0  # a factor on the result
    shape_input: int | None = None  # this input is the shape of the result
    row_input: int | None = None  # this input counts rows of input 0 from the first row of the piece
    is_whole: bool = False  # runs once on the whole inputs; divided results are cut afterwards


Rule = Callable[[ForwardOp, Sequence[Layout]], Way | None]


def whole_way(op: ForwardOp) -> Way:
    """Return the way in which the op runs once."""
    return Way((REPLICATE,) * len(op.inputs), (REPLICATE,) * len(op.outputs), is_whole=True)


def first_shard(layouts: Sequence[Layout]) -> tuple[int, Shard] | None:
    """Return the first divided input and its layout."""
    return next(((at, layout) for at, layout in enumerate(layouts) if isinstance(layout, Shard)), None)


def along(layouts: Sequence[Layout], at: int, op: ForwardOp, output: Layout, **more: Any) -> Way:
    """Return the way that keeps input `at` as it is, takes the others whole, and gives all results one layout."""
    inputs = tuple(layout if one == at else REPLICATE for one, layout in enumerate(layouts))
    return Way(inputs, (output,) * len(op.outputs), **more)
