"""Dynamic shapes: sizes that depend on contents, per dimension.

The number of entries that a mask selects, or of distinct ids, does not follow from the sizes of a call. A tensor with
such a dimension is described by its sizes in two other cases, one with more entries there and one with fewer, and
every op that reads it is run for these cases too, on meta tensors:

    x[:, mask]      (2, 5, 8)    with more (2, 35, 8),   with fewer (2, 2, 8)
    .flatten(1)     (2, 40)      with more (2, 280),     with fewer (2, 16):   its second dimension depends on contents

So equal sizes are not confused. An op that fails on meta tensors has sizes that depend on contents (`arange(n)` of a
tensor) or cannot run on them: then every size that may depend on contents is presumed to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from gemini.ir.encode import tensors, walk
from gemini.ir.op_targets import find_op
from gemini.ir.pytree import Ref
from gemini.quiet_warnings import mute_warnings

Shape = tuple[int, ...]
Resize = Callable[[int], int]
_SAME_SHAPE = frozenset(  # results have the sizes of the first argument; cannot run on meta tensors
    ["to", "cpu", "cuda", "type", "type_as", "pin_memory", "index_put"]
)
_VIEWS = frozenset({"view", "reshape"})
_LISTS = frozenset({"nonzero", "argwhere", "bincount", "masked_select", "where"})  # the counted dimension is the first


def _more(size: int) -> int:
    return 7 * size or 7


def _fewer(size: int) -> int:
    return 2 if size > 2 else size // 2


CASES: tuple[Resize, ...] = (_more, _fewer)


@dataclass(frozen=True)
class DynamicShape:
    """The sizes of a tensor, in the captured and the other cases, and the tensors whose contents decide them."""

    shape: Shape
    other_cases: tuple[Shape, ...]
    causes: tuple[Ref, ...]

    @cached_property
    def dims(self) -> frozenset[int]:
        """Dimensions that depend on contents."""
        return frozenset(
            dim for dim, size in enumerate(self.shape) if any(one[dim] != size for one in self.other_cases)
        )

    def is_dynamic(self, dim: int) -> bool:
        """Return whether a dimension, counted from either end, depends on contents."""
        return dim % max(1, len(self.shape)) in self.dims


@dataclass(frozen=True)
class DynamicResult:
    """A result whose sizes depend on contents, and the tensors that introduce this dependence."""

    tensor: torch.Tensor
    other_cases: tuple[Shape, ...]
    causes: tuple[torch.Tensor, ...]


def size_causes(short: str, args: Any, kwargs: Any, output: Any) -> list[torch.Tensor]:
    """Return the arguments of a counting op whose contents decide the sizes of its result."""
    first = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if short in ("nonzero", "argwhere", "unique", "unique_consecutive", "_unique2", "bincount"):
        return [first]
    if short == "where" and isinstance(output, tuple):
        return [first]
    if short in ("repeat_interleave", "masked_select"):
        named = kwargs.get("mask", kwargs.get("repeats"))
        return [tensor for _, tensor in tensors(args[1] if len(args) > 1 else first if named is None else named)]
    if short == "__getitem__":
        return [tensor for _, tensor in tensors(args[1]) if _is_mask(tensor)]
    return []


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bool, torch.uint8)


def dynamic_sizes(
    name: str, args: Any, kwargs: Any, output: Any, known: Callable[[torch.Tensor], DynamicShape | None]
) -> Iterator[DynamicResult]:
    """Yield the new results of an op whose sizes depend on contents; `known` returns the shapes of its arguments."""
    inputs = [tensor for _, tensor in tensors((args, kwargs))]
    sized = {id(tensor): found for tensor in inputs if (found := known(tensor)) is not None}
    counted = size_causes(name.rpartition(".")[2], args, kwargs, output) if inputs else []
    if not sized and not counted and not any(map(_may_count, inputs)):
        return
    outputs = [tensor for _, tensor in tensors(output)]
    if all(tensor.dim() == 0 or any(tensor is one for one in inputs) for tensor in outputs):
        return
    op = _Op(name, args, kwargs, inputs, outputs, sized)
    cases, causes = op.count_cases(counted) if counted else op.run_cases()
    for at, tensor in enumerate(outputs):
        other_cases = tuple(case[at] for case in cases)
        if all(tensor is not one for one in inputs) and any(shape != tuple(tensor.shape) for shape in other_cases):
            yield DynamicResult(tensor, other_cases, causes)


@dataclass
class _Op:
    """One executed call of an op."""

    name: str
    args: Any
    kwargs: Any
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    sized: dict[int, DynamicShape]
    needs_contents: bool = False  # whether it failed on meta tensors

    @property
    def short(self) -> str:
        """Name without module."""
        return self.name.rpartition(".")[2]

    # ── counting ops ──────────────────────────────────────────────────────────────────────────────────────────
    def count_cases(self, causes: Sequence[torch.Tensor]) -> tuple[list[list[Shape]], tuple[torch.Tensor, ...]]:
        """Return the result sizes of a counting op, per case."""
        cases = [self._mask_case(case) if self.short == "__getitem__" else self._count_case(case) for case in (0, 1)]
        if any(case is None for case in cases):
            cases = [[tuple(map(resize, one.shape)) for one in self.outputs] for resize in CASES]
        return [case for case in cases if case is not None], tuple(causes)

    def _mask_case(self, case: int) -> list[Shape] | None:
        """Return the sizes of an indexing op with each mask replaced by as many indices as it selects."""

        def replace_mask(index: Any) -> list[Any]:
            if not _is_mask(index):
                return [self._empty(index, case) if isinstance(index, torch.Tensor) else index]
            count = (CASES[case](int(torch.count_nonzero(index))),)
            return [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]

        index = self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)
        if any(_is_mask(part) and not part.dim() for part in index):
            return None
        return self._attempt(
            lambda: self._empty(self.args[0], case)[tuple(place for part in index for place in replace_mask(part))]
        )

    def _count_case(self, case: int) -> list[Shape]:
        """Return the sizes of a counting op: one dimension is counted, the others are those of the first argument."""
        dim = self._dim()
        base = self._shape(self.inputs[0], case)
        count = self.outputs[0].shape[dim]
        found = []
        for at, tensor in enumerate(self.outputs):
            has_base = tensor.dim() == len(base) and self.short not in _LISTS
            shape = list(base if has_base else tensor.shape)
            if at == 0 or self.short in _LISTS:
                shape[dim] = CASES[case](tensor.shape[dim])
            elif tensor.dim() == 1 and tensor.shape[0] == count:
                shape[0] = CASES[case](count)
            found.append(tuple(shape))
        return found

    def _dim(self) -> int:
        """Return the dimension along which an op counts."""
        places = {"unique": 4, "unique_consecutive": 3, "repeat_interleave": 2}
        at = places.get(self.short, len(self.args))
        dim = self.kwargs.get("dim", self.args[at] if at < len(self.args) else None)
        return int(dim) if dim is not None else 0

    # ── other ops ──────────────────────────────────────────────────────────────────────────────────────────────
    def run_cases(self) -> tuple[list[list[Shape]], tuple[torch.Tensor, ...]]:
        """Return the result sizes of an op, per case, and the tensors whose contents it reads."""
        if self.short in _SAME_SHAPE:
            return [[self._shape(self.inputs[0], case)] * len(self.outputs) for case in (0, 1)], ()
        cases, numbers = [self._case(case) for case in ((0, 1) if self.sized else (0,))], False
        if all(case is None for case in cases):
            cases, numbers = self._cases_of_numbers(), True
        if all(case is None for case in cases):
            return self._presume_cases()
        read = [one for one in self.inputs if numbers and _is_number(one)]
        return [case for case in cases if case is not None], tuple(read)

    def _case(self, case: int, change: Resize | None = None) -> list[Shape] | None:
        """Return the sizes in a case; with `change`, tensors in place of a number are that number, changed."""

        def stand_in(tensor: torch.Tensor) -> Any:
            if change is not None and _is_number(tensor):
                return change(int(tensor))
            return self._empty(tensor, case)

        return self._attempt(
            lambda: find_op(self.name)(*_map_tensors(self.args, stand_in), **_map_tensors(self.kwargs, stand_in))
        )

    def _cases_of_numbers(self) -> list[list[Shape] | None]:
        """Return the sizes for a larger and for a smaller number where a tensor is in place of a number."""
        if not any(_is_number(tensor) for tensor in self.inputs):
            return []
        larger, smaller = (_more, lambda number: number + 1), (_fewer, lambda number: number - 1)
        return [
            next(filter(None, (self._case(case, change) for change in changes)), None)
            for case, changes in enumerate((larger, smaller))
        ]

    def _presume_cases(self) -> tuple[list[list[Shape]], tuple[torch.Tensor, ...]]:
        """Return the sizes of an op that cannot run on meta tensors: all that may depend on contents do."""
        read = () if self.sized else tuple(filter(_may_count, self.inputs))
        if read and self.needs_contents:
            return [[tuple(map(resize, one.shape)) for one in self.outputs] for resize in CASES], read
        moving, fixed = self._sizes()

        def resize_presumed(tensor: torch.Tensor, resize: Resize) -> Shape:
            return tuple(resize(size) if size in moving or size not in fixed else size for size in tensor.shape)

        return [[resize_presumed(tensor, resize) for tensor in self.outputs] for resize in CASES], read

    def _sizes(self) -> tuple[set[int], set[int]]:
        """Return the argument sizes that depend on contents, and those that do not or are passed as numbers."""
        numbers = {leaf for _, leaf in walk((self.args, self.kwargs)) if isinstance(leaf, int)}
        if self.short in _VIEWS and -1 not in numbers:  # the sizes are the arguments
            return set(), numbers
        moving = {found.shape[dim] for found in self.sized.values() for dim in found.dims}
        if not self.needs_contents:  # sizes do not fit: they must equal sizes that do not depend on contents
            moving -= {size for tensor in self.inputs if id(tensor) not in self.sized for size in tensor.shape}
        fixed = {
            size
            for tensor in self.inputs
            for dim, size in enumerate(tensor.shape)
            if id(tensor) not in self.sized or dim not in self.sized[id(tensor)].dims
        }
        return (set() if self.short in _VIEWS else moving), fixed | numbers

    # ── meta tensors ─────────────────────────────────────────────────────────────────────────────────────────
    def _shape(self, tensor: torch.Tensor, case: int) -> Shape:
        found = self.sized.get(id(tensor))
        return tuple(tensor.shape) if found is None else found.other_cases[min(case, len(found.other_cases) - 1)]

    def _empty(self, tensor: torch.Tensor, case: int) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise NotImplementedError
        return torch.empty(self._shape(tensor, case), dtype=tensor.dtype, device="meta")

    def _attempt(self, run: Callable[[], Any]) -> list[Shape] | None:
        """Return the sizes of the results of `run()`; None where it fails or returns other results."""
        try:
            with torch.no_grad(), mute_warnings():
                shapes = [tuple(tensor.shape) for _, tensor in tensors(run())][: len(self.outputs)]
        except Exception as error:
            self.needs_contents = self.needs_contents or isinstance(error, NotImplementedError) or "meta" in str(error)
            return None
        ranks = [tensor.dim() for tensor in self.outputs]
        return shapes if [len(shape) for shape in shapes] == ranks else None


def _is_number(tensor: torch.Tensor) -> bool:
    """Return whether a tensor can be passed in place of a number."""
    whole = _may_count(tensor) and tensor.dtype is not torch.bool
    return whole and tensor.numel() == 1 and tensor.device.type != "meta"


def _may_count(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """Return nested containers with other tensors, on the meta device."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, torch.device):
        return torch.device("meta")
    if isinstance(value, slice):
        return slice(*(_map_tensors(part, change) for part in (value.start, value.stop, value.step)))
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(part, change) for part in value)
    if type(value) is dict:
        return {key: "meta" if key == "device" and part else _map_tensors(part, change) for key, part in value.items()}
    return value


def resize_cases(shape: Shape, dims: Callable[[int, int], bool]) -> tuple[Shape, ...]:
    """Return the other cases of a shape; `dims(index, size)` selects the dimensions that depend on contents."""
    return tuple(tuple(one(size) if dims(dim, size) else size for dim, size in enumerate(shape)) for one in CASES)
