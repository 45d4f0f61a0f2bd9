"""Sizes that depend on contents, dimension by dimension.

How many entries a mask selects, or how many different ids there are, is no fact about the sizes of a call: another
batch has more or fewer. A tensor with such a dimension is known by its sizes in two other cases, one with more entries
there and one with fewer, and every op that is given it is run for these cases too, on tensors without contents:

    x[:, mask]      (2, 5, 8)    with more (2, 35, 8),   with fewer (2, 2, 8)
    .flatten(1)     (2, 40)      with more (2, 280),     with fewer (2, 16):   its second dimension depends on contents

So a size that happens to equal another one is not taken for it. An op that fails without contents is one whose sizes
depend on them (`arange(n)` of a tensor), or cannot be run so: then whatever may depend on contents counts as such.
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
from gemini.quiet_warnings import muted

Shape = tuple[int, ...]
Resize = Callable[[int], int]
_ALIKE = frozenset(  # of the sizes of the first argument, and cannot be run without contents
    ["to", "cpu", "cuda", "type", "type_as", "pin_memory", "index_put"]
)
_VIEWS = frozenset({"view", "reshape"})
_LISTS = frozenset({"nonzero", "argwhere", "bincount", "masked_select", "where"})  # what is counted comes first


def _more(size: int) -> int:
    return 7 * size or 7


def _fewer(size: int) -> int:
    return 2 if size > 2 else size // 2


CASES: tuple[Resize, ...] = (_more, _fewer)


@dataclass(frozen=True)
class DynamicShape:
    """The sizes of a tensor, as they are and in the other cases, and the tensors whose contents decide them."""

    shape: Shape
    others: tuple[Shape, ...]
    causes: tuple[Ref, ...]

    @cached_property
    def dims(self) -> frozenset[int]:
        """The dimensions that depend on contents."""
        return frozenset(dim for dim, size in enumerate(self.shape) if any(one[dim] != size for one in self.others))

    def is_dynamic(self, dim: int) -> bool:
        """Whether a dimension, counted from either end, depends on contents."""
        return dim % max(1, len(self.shape)) in self.dims


@dataclass(frozen=True)
class DynamicResult:
    """A result whose sizes depend on contents, and the tensors by which they come to do so here."""

    tensor: torch.Tensor
    others: tuple[Shape, ...]
    causes: tuple[torch.Tensor, ...]


def size_causes(short: str, args: Any, kwargs: Any, output: Any) -> list[torch.Tensor]:
    """The arguments of an op that is known to count, whose contents decide the sizes of its result."""
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
    """The new tensors in the result of an op whose sizes depend on contents; `known` tells of what it is given."""
    given = [tensor for _, tensor in tensors((args, kwargs))]
    sized = {id(tensor): found for tensor in given if (found := known(tensor)) is not None}
    counted = size_causes(name.rpartition(".")[2], args, kwargs, output) if given else []
    if not sized and not counted and not any(map(_may_count, given)):
        return
    made = [tensor for _, tensor in tensors(output)]
    if all(tensor.dim() == 0 or any(tensor is one for one in given) for tensor in made):
        return
    op = _Op(name, args, kwargs, given, made, sized)
    cases, causes = op.counting(counted) if counted else op.computing()
    for at, tensor in enumerate(made):
        others = tuple(case[at] for case in cases)
        if all(tensor is not one for one in given) and any(shape != tuple(tensor.shape) for shape in others):
            yield DynamicResult(tensor, others, causes)


@dataclass
class _Op:
    """One call of an op, which has run."""

    name: str
    args: Any
    kwargs: Any
    given: list[torch.Tensor]
    made: list[torch.Tensor]
    sized: dict[int, DynamicShape]
    asks: bool = False  # whether it failed for want of contents

    @property
    def short(self) -> str:
        """Its name without where it is from."""
        return self.name.rpartition(".")[2]

    # ── ops that count ─────────────────────────────────────────────────────────────────────────────────────────
    def counting(self, causes: Sequence[torch.Tensor]) -> tuple[list[list[Shape]], tuple[torch.Tensor, ...]]:
        """The sizes of the results of an op that counts, in every case."""
        cases = [self._selected(case) if self.short == "__getitem__" else self._counted(case) for case in (0, 1)]
        if any(case is None for case in cases):
            cases = [[tuple(map(resize, one.shape)) for one in self.made] for resize in CASES]
        return [case for case in cases if case is not None], tuple(causes)

    def _selected(self, case: int) -> list[Shape] | None:
        """Masks select as many as there are numbers in their place."""

        def places(index: Any) -> list[Any]:
            if not _is_mask(index):
                return [self._empty(index, case) if isinstance(index, torch.Tensor) else index]
            count = (CASES[case](int(torch.count_nonzero(index))),)
            return [torch.empty(count, dtype=torch.int64, device="meta") for _ in range(index.dim())]

        index = self.args[1] if isinstance(self.args[1], tuple) else (self.args[1],)
        if any(_is_mask(part) and not part.dim() for part in index):
            return None
        return self._attempt(
            lambda: self._empty(self.args[0], case)[tuple(place for part in index for place in places(part))]
        )

    def _counted(self, case: int) -> list[Shape]:
        """What is counted lies along one dimension; the others are those of the first argument."""
        dim = self._dim()
        base = self._shape(self.given[0], case)
        count = self.made[0].shape[dim]
        found = []
        for at, tensor in enumerate(self.made):
            alike = tensor.dim() == len(base) and self.short not in _LISTS
            shape = list(base if alike else tensor.shape)
            if at == 0 or self.short in _LISTS:
                shape[dim] = CASES[case](tensor.shape[dim])
            elif tensor.dim() == 1 and tensor.shape[0] == count:
                shape[0] = CASES[case](count)
            found.append(tuple(shape))
        return found

    def _dim(self) -> int:
        """The dimension along which an op counts."""
        places = {"unique": 4, "unique_consecutive": 3, "repeat_interleave": 2}
        at = places.get(self.short, len(self.args))
        dim = self.kwargs.get("dim", self.args[at] if at < len(self.args) else None)
        return int(dim) if dim is not None else 0

    # ── all others ─────────────────────────────────────────────────────────────────────────────────────────────
    def computing(self) -> tuple[list[list[Shape]], tuple[torch.Tensor, ...]]:
        """The sizes of the results of an op in every case, and the tensors whose contents have come into play."""
        if self.short in _ALIKE:
            return [[self._shape(self.given[0], case)] * len(self.made) for case in (0, 1)], ()
        cases, numbers = [self._case(case) for case in ((0, 1) if self.sized else (0,))], False
        if all(case is None for case in cases):
            cases, numbers = self._cases_of_numbers(), True
        if all(case is None for case in cases):
            return self._presumed()
        asked = [one for one in self.given if numbers and _is_number(one)]
        return [case for case in cases if case is not None], tuple(asked)

    def _case(self, case: int, change: Resize | None = None) -> list[Shape] | None:
        """The sizes in a case; with `change`, tensors that stand for a number are that number, changed so."""

        def stand_in(tensor: torch.Tensor) -> Any:
            if change is not None and _is_number(tensor):
                return change(int(tensor))
            return self._empty(tensor, case)

        return self._attempt(
            lambda: find_op(self.name)(*_map_tensors(self.args, stand_in), **_map_tensors(self.kwargs, stand_in))
        )

    def _cases_of_numbers(self) -> list[list[Shape] | None]:
        """The sizes where a tensor that stands for a number stands for a larger, and for a smaller one."""
        if not any(_is_number(tensor) for tensor in self.given):
            return []
        larger, smaller = (_more, lambda number: number + 1), (_fewer, lambda number: number - 1)
        return [
            next(filter(None, (self._case(case, change) for change in changes)), None)
            for case, changes in enumerate((larger, smaller))
        ]

    def _presumed(self) -> tuple[list[list[Shape]], tuple[torch.Tensor, ...]]:
        """Where an op cannot be run without contents: what may depend on them is presumed to."""
        asked = () if self.sized else tuple(filter(_may_count, self.given))
        if asked and self.asks:
            return [[tuple(map(resize, one.shape)) for one in self.made] for resize in CASES], asked
        moving, fixed = self._sizes()

        def presumed(tensor: torch.Tensor, resize: Resize) -> Shape:
            return tuple(resize(size) if size in moving or size not in fixed else size for size in tensor.shape)

        return [[presumed(tensor, resize) for tensor in self.made] for resize in CASES], asked

    def _sizes(self) -> tuple[set[int], set[int]]:
        """The sizes of the arguments that depend on contents, and those that do not or are given as numbers."""
        numbers = {leaf for _, leaf in walk((self.args, self.kwargs)) if isinstance(leaf, int)}
        if self.short in _VIEWS and -1 not in numbers:  # it is as it says, or fails
            return set(), numbers
        moving = {found.shape[dim] for found in self.sized.values() for dim in found.dims}
        if not self.asks:  # sizes do not fit: it runs only where they are those of what does not depend on contents
            moving -= {size for tensor in self.given if id(tensor) not in self.sized for size in tensor.shape}
        fixed = {
            size
            for tensor in self.given
            for dim, size in enumerate(tensor.shape)
            if id(tensor) not in self.sized or dim not in self.sized[id(tensor)].dims
        }
        return (set() if self.short in _VIEWS else moving), fixed | numbers

    # ── tensors without contents ───────────────────────────────────────────────────────────────────────────────
    def _shape(self, tensor: torch.Tensor, case: int) -> Shape:
        found = self.sized.get(id(tensor))
        return tuple(tensor.shape) if found is None else found.others[min(case, len(found.others) - 1)]

    def _empty(self, tensor: torch.Tensor, case: int) -> torch.Tensor:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise NotImplementedError
        return torch.empty(self._shape(tensor, case), dtype=tensor.dtype, device="meta")

    def _attempt(self, run: Callable[[], Any]) -> list[Shape] | None:
        """The sizes of what an op returns; None where it cannot be run, or returns something else."""
        try:
            with torch.no_grad(), muted():
                shapes = [tuple(tensor.shape) for _, tensor in tensors(run())][: len(self.made)]
        except Exception as error:  # whatever it was, it did not fail on contents
            self.asks = self.asks or isinstance(error, NotImplementedError) or "meta" in str(error)
            return None
        ranks = [tensor.dim() for tensor in self.made]
        return shapes if [len(shape) for shape in shapes] == ranks else None


def _is_number(tensor: torch.Tensor) -> bool:
    """Whether a tensor may stand where a number is asked for."""
    whole = _may_count(tensor) and tensor.dtype is not torch.bool
    return whole and tensor.numel() == 1 and tensor.device.type != "meta"


def _may_count(tensor: torch.Tensor) -> bool:
    return not tensor.is_floating_point() and not tensor.is_complex()


def _map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nest with other tensors, on the device that has no contents."""
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
    """The other cases of sizes of which some dimensions, by place and size, depend on contents."""
    return tuple(tuple(one(size) if dims(dim, size) else size for dim, size in enumerate(shape)) for one in CASES)
