"""Alias holders: what refers to the memory of tensors, and whether all of it moves along when the memory moves.

Tensors on a storage move with it, and so does everything that reaches the memory through them. An object that holds the
address itself (a NumPy array, a DLPack capsule) does not: it references a tensor, from outside of Python's garbage
collector. So references are counted, and each must be explained:

    storage     ◄── tensors                     those that Python knows
    tensor      ◄── views of it, graphs that saved it, its gradient accumulator, its Python object
    its object  ◄── containers, frames, the tensor itself

The counts of a tensor without aliases are explained at once; only for others is the heap searched, once. Counts that
remain unexplained are reported: such memory must stay where it is.
"""

from __future__ import annotations

import functools
import gc
import inspect
import sys
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, compress
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gemini.runtime.memory.memory_origin import MemoryOrigins
from gemini.runtime.memory.shared_layout import is_in_segment
from gemini.runtime.memory.storage_exchange import can_exchange

# Of the base class: subclasses, such as deferred tensors, may run code of their own for attributes.
_BASE, _GRAD_FN = torch._C.TensorBase._base.__get__, torch._C.TensorBase.grad_fn.__get__
_STORAGE = torch._C.TensorBase.untyped_storage
_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)
_tensor_uses: Any = getattr(torch._C.TensorBase, "_use_count", None)
_OUTSIDE = "an object outside of Python's garbage collector (a NumPy array or a DLPack capsule, for example)"
_LEAVES = (  # kinds of objects that never hold a tensor directly, and are most of a heap
    types.FunctionType, types.CodeType, types.GetSetDescriptorType, types.MemberDescriptorType, types.ModuleType,
    types.MethodDescriptorType, types.WrapperDescriptorType, type,
)  # fmt: skip


def find_holders(tensors: Iterable[torch.Tensor]) -> dict[int, str]:
    """Return by storage (its `_cdata`) what holds the address of its memory; storages that can move have no entry."""
    storages: dict[int, list[torch.Tensor]] = {}
    for tensor in {id(tensor): tensor for tensor in tensors}.values():
        storages.setdefault(tensor.untyped_storage()._cdata, []).append(tensor)
    origins, found, unclear = MemoryOrigins(), dict[int, str](), list[torch.UntypedStorage]()
    with torch.inference_mode(False), torch._C.DisableTorchFunction():
        for key, sharing in storages.items():
            storage = sharing[0].untyped_storage()
            if not can_exchange(storage.device):
                found[key] = f"torch {torch.__version__}, whose storages Gemini cannot read"
            elif owner := "" if is_in_segment(storage) else origins.find_owner(storage):
                found[key] = owner
            elif not _is_clear(storage, sharing):
                unclear.append(storage)
        if unclear:
            found |= dict.fromkeys(_search(unclear), _OUTSIDE)
    return found


def has_other_tensors(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether other tensors than these are on the storage that all of these are on."""
    storage = tensors[0].untyped_storage()
    return bool(_storage_uses is None or _storage_uses(storage._cdata) != len(tensors) + 1)


def _is_clear(storage: torch.UntypedStorage, sharing: list[torch.Tensor]) -> bool:
    """Return whether the tensors are the only users of their storage, and nothing holds its address.

    Converting a tensor to a NumPy array makes its storage one that cannot be resized, for ever.
    """
    if _storage_uses is None or _tensor_uses is None or has_other_tensors(sharing):
        return False
    return storage.resizable() and all(_tensor_uses(tensor) == 1 + _count_accumulators(tensor) for tensor in sharing)


def _count_accumulators(tensor: torch.Tensor) -> int:
    """Return whether a gradient accumulator holds a tensor; it exists as long as a graph refers to it."""
    if _tensor_uses(tensor) == 1 or not tensor.requires_grad or _GRAD_FN(tensor) is not None:
        return 0
    with torch.enable_grad():
        before = _tensor_uses(tensor)
        accumulator = get_gradient_edge(tensor).node
    return int(_tensor_uses(tensor) == before and accumulator is not None)


# ── the search ────────────────────────────────────────────────────────────────────────────────────────────────────
def _search(storages: list[torch.UntypedStorage]) -> list[int]:
    """Return the storages, by `_cdata`, with references that nothing on the heap explains."""
    if _storage_uses is None or _tensor_uses is None:
        return [storage._cdata for storage in storages]
    heap = gc.get_objects()
    wanted = {storage._cdata for storage in storages}
    tensors = _select_tensors(heap)
    aliases = {id(tensor): tensor for tensor in tensors if _storage_of(tensor) in wanted}
    _add_bases(aliases)
    saves: Counter[int] = Counter()
    unexplained = _unexplained_uses(storages, aliases, saves)
    if unexplained:
        held = chain(_saved_tensors(map(_GRAD_FN, tensors)), _scripted_tensors(heap))
        _add_held(aliases, saves, wanted, held)
        unexplained = _unexplained_uses(storages, aliases, saves)
    del tensors
    fixed = {storage._cdata for storage in storages if not storage.resizable()} - unexplained
    if fixed:
        unexplained |= _unexplained_references(heap, [a for a in aliases.values() if _storage_of(a) in fixed], aliases)
    return [*unexplained]


def _select_tensors(heap: list[Any]) -> list[torch.Tensor]:
    kinds = {kind for kind in {*map(type, heap)} if issubclass(kind, torch.Tensor)}
    return [*compress(heap, map(kinds.__contains__, map(type, heap)))]


def _storage_of(tensor: torch.Tensor) -> int:
    try:
        return int(_STORAGE(tensor)._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return 0


def _add_bases(aliases: dict[int, torch.Tensor]) -> None:
    """Add tensors of which others are views: they may have no other Python reference."""
    for tensor in [*aliases.values()]:
        if (base := _BASE(tensor)) is not None:
            aliases.setdefault(id(base), base)


def _add_held(
    aliases: dict[int, torch.Tensor], saves: Counter[int], wanted: set[int], held: Iterable[torch.Tensor]
) -> None:
    """Add tensors that objects of C++ hold as tensors, and count how often each is held."""
    for tensor in held:
        if _storage_of(tensor) in wanted:
            aliases.setdefault(id(tensor), tensor)
            saves[id(tensor)] += 1
    _add_bases(aliases)


def _scripted_tensors(heap: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules compiled by torch.jit, once for each module that has them."""
    kinds = {kind for kind in {*map(type, heap)} if issubclass(kind, torch.jit.ScriptModule)}
    for module in compress(heap, map(kinds.__contains__, map(type, heap))):
        compiled = vars(module).get("_c")
        if compiled is not None:
            yield from (one for _, one in torch._C.ParameterDict(compiled).items())
            yield from (one for _, one in torch._C.BufferDict(compiled).items())


def _saved_tensors(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that graphs have saved for backward, once for each node that saved them."""
    seen = {node for node in nodes if node is not None}
    left = [*seen]
    while left:
        node = left.pop()
        behind = {next_node for next_node, _ in node.next_functions if next_node is not None} - seen
        seen |= behind
        left += behind
        leaf = getattr(node, "variable", None)
        if leaf is not None and not leaf.requires_grad:  # frozen since; accumulators of others are counted
            yield leaf
        for name in dir(node):
            if name == "saved_tensors" or name.startswith("_saved_"):
                try:
                    value = getattr(node, name)
                except Exception:  # a graph that is freed, or a hook of the script
                    break
                yield from (one for one in (value if isinstance(value, tuple) else (value,)) if _is_tensor(one))


def _is_tensor(value: Any) -> bool:
    return issubclass(type(value), torch.Tensor)


def _unexplained_uses(
    storages: list[torch.UntypedStorage], aliases: dict[int, torch.Tensor], saves: Counter[int]
) -> set[int]:
    """Return the storages with other users than these tensors, or a tensor of which has other users than views."""
    users = Counter(_storage_of(tensor) for tensor in aliases.values())
    found = {one._cdata for one in storages if _storage_uses(one._cdata) != users[one._cdata] + 1}
    views = Counter(map(id, map(_BASE, aliases.values())))
    for key, tensor in aliases.items():
        if _tensor_uses(tensor) != 1 + _count_accumulators(tensor) + views[key] + saves[key]:
            found.add(_storage_of(tensor))
    return found


def _unexplained_references(
    heap: list[Any], suspects: list[torch.Tensor], aliases: dict[int, torch.Tensor]
) -> set[int]:
    """Return the storages of tensors whose Python objects have references that nothing explains."""
    containers = [*compress(heap, map(_may_hold, map(type, heap)))]
    heap.clear()
    explained = _count_references(containers, aliases.keys())
    containers.clear()
    owned = [int(_tensor_counts_itself() and _tensor_uses(one) > 1) for one in suspects]
    aliases.clear()
    counts = [*map(sys.getrefcount, suspects)]
    surplus = [
        count - _LISTED - owns - explained[id(one)] for count, owns, one in zip(counts, owned, suspects, strict=True)
    ]
    if any(surplus):
        held = _count_references_of_frames({id(one) for one in suspects})
        surplus = [count - held[id(one)] for count, one in zip(surplus, suspects, strict=True)]
    return {_storage_of(one) for count, one in zip(surplus, suspects, strict=True) if count}


def _may_hold(kind: type) -> bool:
    return kind not in _LEAVES


def _count_references(containers: list[Any], wanted: Iterable[int]) -> Counter[int]:
    """Return how often containers reference objects, by identity."""
    referents = gc.get_referents(*containers)
    return Counter(map(id, compress(referents, map({*wanted}.__contains__, map(id, referents)))))


def _count_references_of_frames(wanted: set[int]) -> Counter[int]:
    """Return how often local variables of running functions reference objects, by identity.

    Suspended generators, cells and variables of modules and classes are containers of the garbage collector.
    """
    found: Counter[int] = Counter()
    for frame in sys._current_frames().values():
        here: types.FrameType | None = frame
        while here is not None:
            if _has_plain_locals(here):
                found.update(id(value) for value in _read_locals(here) if id(value) in wanted)
            here = here.f_back
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


def _count_of_listed() -> int:
    """Return what the reference count of an object in a list, read by `map`, is, if nothing else holds it."""
    return next(map(sys.getrefcount, [object()]))


@functools.lru_cache(maxsize=1)
def _tensor_counts_itself() -> bool:
    """Return whether a tensor that C++ uses, too, references its Python object; in some versions it does not."""
    tensor = torch.empty(2)
    before = sys.getrefcount(tensor)
    view = tensor[:1]
    return sys.getrefcount(tensor) > before and view is not None


_SNAPSHOT, _LISTED = _count_of_snapshot(), _count_of_listed()
