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

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from gemini.runtime.memory.memory_origin import MemoryOrigins
from gemini.runtime.memory.object_references import Heap, find_unexplained
from gemini.runtime.memory.shared_layout import is_in_segment
from gemini.runtime.memory.storage_exchange import can_exchange

# Of the base class: subclasses, such as deferred tensors, may run code of their own for attributes.
_BASE, _GRAD_FN = torch._C.TensorBase._base.__get__, torch._C.TensorBase.grad_fn.__get__
_STORAGE = torch._C.TensorBase.untyped_storage
_storage_uses: Any = getattr(torch._C, "_storage_Use_Count", None)
_tensor_uses: Any = getattr(torch._C.TensorBase, "_use_count", None)
_OUTSIDE = "an object outside of Python's garbage collector (a NumPy array or a DLPack capsule, for example)"


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
    heap = Heap(gc.get_objects())
    wanted = {storage._cdata for storage in storages}
    tensors = heap.instances(torch.Tensor)
    aliases = {id(tensor): tensor for tensor in tensors if _storage_of(tensor) in wanted}
    _add_bases(aliases)
    saves: Counter[int] = Counter()
    unexplained = _unexplained_uses(storages, aliases, saves)
    if unexplained:
        held = chain(_saved_tensors(map(_GRAD_FN, tensors)), _scripted_tensors(heap))
        _add_held(aliases, saves, wanted, held)
        unexplained = _unexplained_uses(storages, aliases, saves)
    fixed = {storage._cdata for storage in storages if not storage.resizable()} - unexplained
    suspects = [alias for alias in aliases.values() if _storage_of(alias) in fixed]
    del tensors
    aliases.clear()  # from here on, only `suspects` references them
    if suspects:
        uses = [*map(_tensor_uses, suspects)]
        unexplained |= {_storage_of(one) for one in find_unexplained(suspects, uses, heap)}
    return [*unexplained]


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


def _scripted_tensors(heap: Heap) -> Iterator[torch.Tensor]:
    """Yield the tensors of modules compiled by torch.jit, once for each module that has them."""
    for module in heap.instances(torch.jit.ScriptModule):
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
