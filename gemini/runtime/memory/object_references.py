"""Object references: references on the Python objects of tensors, and whether containers and frames explain them.

A reference that neither a container of the garbage collector nor a local variable holds is that of an object written in
C, as a NumPy array that shows the memory of a tensor.
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
import typing
import weakref
from collections import Counter
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import compress
from typing import Any

import torch
from torch import nn

# Kinds of objects that never hold a tensor directly, and are many of a heap.
_LEAVES = {
    types.FunctionType, types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.ModuleType,
    types.MethodDescriptorType, types.WrapperDescriptorType, types.GenericAlias, types.UnionType, weakref.ref, type,
    *map(type, (typing.List[int], typing.Optional[int])),  # noqa: UP006, UP045 - their classes have no public names
}  # fmt: skip


class Heap:
    """All objects of the garbage collector at one time: `Heap(gc.get_objects())`, which does not hold itself.

    Looking at each object takes most of a search, and happens once.
    """

    def __init__(self, objects: list[Any]) -> None:
        self._objects = objects
        self._types = [*map(type, self._objects)]
        self._kinds = {*self._types}

    def instances(self, base: type) -> list[Any]:
        """Return the instances of a class and its subclasses."""
        return self._select({kind for kind in self._kinds if issubclass(kind, base)})

    def tables(self) -> list[dict[str, Any]]:
        """Return the tables of parameters and buffers of all modules."""
        names = ("_parameters", "_buffers")
        found = [vars(module).get(name) for module in self.instances(nn.Module) for name in names]
        return [table for table in found if type(table) is dict and gc.is_tracked(table)]

    def dictionaries(self) -> list[dict[Any, Any]]:
        """Return all dictionaries, which hold most references of a heap."""
        return self._select({dict})

    def other_containers(self) -> list[Any]:
        """Return the objects that may hold tensors, except for dictionaries."""
        return self._select(self._kinds - _LEAVES - {dict})

    def _select(self, kinds: set[type]) -> list[Any]:
        return [*compress(self._objects, map(kinds.__contains__, self._types))]


def find_unexplained(tensors: list[torch.Tensor], uses: list[int], heap: Heap) -> list[torch.Tensor]:
    """Return the tensors whose Python objects have unexplained references.

    Only this list and the heap, which is older, may reference the tensors in addition to the script. `uses`: the
    reference counts of the tensors in C++.
    """
    counts = [*map(sys.getrefcount, tensors)]
    known = {*map(id, heap.instances(torch.Tensor))}
    left = {
        id(one): count - _LISTED - int(id(one) in known) - int(_counts_itself() and used > 1)
        for one, count, used in zip(tensors, counts, uses, strict=True)
    }
    tables = heap.tables()
    searches: list[Callable[[set[int]], Counter[int]]] = [
        partial(_count_references, tables),
        lambda wanted: _count_references(heap.other_containers(), wanted),
        lambda wanted: _count_references(_without(heap.dictionaries(), tables), wanted),
        _count_references_of_frames,
    ]
    for search in searches:
        wanted = {key for key, count in left.items() if count}
        found = search(wanted) if wanted else Counter()
        left = {key: count - found[key] for key, count in left.items()}
    return [one for one in tensors if left[id(one)]]


def _without(containers: list[Any], others: list[Any]) -> list[Any]:
    known = {*map(id, others)}
    return [one for one in containers if id(one) not in known]


def _count_references(containers: list[Any], wanted: set[int]) -> Counter[int]:
    """Return how often containers reference objects, by identity."""
    referents = gc.get_referents(*containers)
    return Counter(map(id, compress(referents, map(wanted.__contains__, map(id, referents)))))


def _count_references_of_frames(wanted: set[int]) -> Counter[int]:
    """Return how often local variables of running functions reference objects, by identity.

    Suspended generators, cells and variables of modules and classes are containers of the garbage collector.
    """
    found: Counter[int] = Counter()
    frames = [*sys._current_frames().values()]
    while frames:
        here = frames.pop()
        if here.f_back is not None:
            frames.append(here.f_back)
        if _has_plain_locals(here):
            found.update(id(value) for value in _read_locals(here) if id(value) in wanted)
        del here  # a variable with its own frame would keep all frames, and their variables
    return found


def _has_plain_locals(frame: types.FrameType) -> bool:
    generators = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
    return bool(frame.f_code.co_flags & inspect.CO_OPTIMIZED and not frame.f_code.co_flags & generators)


def _read_locals(frame: types.FrameType) -> list[Any]:
    """Return the values of a function's own variables, without a lasting copy of them in the frame."""
    code, values = frame.f_code, frame.f_locals
    cells = {*code.co_cellvars, *code.co_freevars}
    found = [values[name] for name in code.co_varnames if name in values and name not in cells]
    if sys.version_info < (3, 13) and sys.getrefcount(values) <= _SNAPSHOT:
        values.clear()  # else the variables would live as long as the frame
    return found


def _count_of_snapshot() -> int:
    """Return what the reference count of the snapshot in `_read_locals` is, if the script does not hold it."""
    values = sys._getframe().f_locals
    return sys.getrefcount(values)


@lru_cache(maxsize=1)
def _counts_itself() -> bool:
    """Return whether a tensor that C++ uses, too, references its Python object; in some versions it does not."""
    tensor = torch.empty(2)
    before = sys.getrefcount(tensor)
    view = tensor[:1]
    return sys.getrefcount(tensor) > before and view is not None


# The reference count of an object in one list, read by `map`.
_SNAPSHOT, _LISTED = _count_of_snapshot(), next(map(sys.getrefcount, [object()]))
