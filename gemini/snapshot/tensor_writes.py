"""Tensor writes: the tensors of a model that a run writes, each copied before its first write.

Copying all weights to undo a run would double the memory of the model, though few models write any. A dispatch mode
sees every kernel before it runs and copies a tensor of the model before a kernel first writes its storage. Writes
through `.data`, detached views and `out=` count, since memory is identified by storage.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.ir.encode import walk

# Kernels of batch normalization write these without declaring it in their schema.
_UNDECLARED = frozenset({"running_mean", "running_var"})


@dataclass(frozen=True)
class TensorCopy:
    """A tensor of the model, and its contents before the first write."""

    name: str
    tensor: torch.Tensor
    before: torch.Tensor


class TensorWriteMode(TorchDispatchMode):  # type: ignore[misc]
    """Dispatch mode that copies tensors before their first write; `copies` holds the copies so far."""

    supports_higher_order_operators = True
    schemas: ClassVar[dict[int, tuple[int | str, ...]]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # True would load the compiler, which takes longer than many captures

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[TensorCopy] = []
        self.copied: set[int] = set()
        self.dirty: set[int] = set()  # written since `undo`
        self.compiled = False
        self.watched: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def watch(self, owned: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Watch these tensors in place of the previous ones."""
        self.watched = {}
        for name, tensor in owned:
            key = storage_id(tensor)
            if key:
                self.watched.setdefault(key, []).append((name, tensor))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel."""
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a kernel, and copy the tensors it writes first."""
        written = self.schemas.get(id(func))  # by identity: hashing a kernel is slow, and kernels are never freed
        if written is None:
            written = self.schemas[id(func)] = _written_arguments(func)
        self.compiled |= isinstance(func, torch._ops.HigherOrderOperator)
        if written:
            for where in written:
                self._note(kwargs.get(where) if isinstance(where, str) else _at(args, where))
        return func(*args, **kwargs)

    def forget_compiled(self) -> None:
        """Reset the compiler after `torch.cond` and similar ops: code they compile under a mode fails without it."""
        if self.compiled:
            import torch._dynamo

            torch._dynamo.reset()

    def undo(self) -> None:
        """Restore all written tensors."""
        for copy in self.copies:
            if id(copy.tensor) in self.dirty:
                restore_tensor(copy)
        self.dirty.clear()

    def _note(self, value: Any) -> None:
        for tensor in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(tensor, torch.Tensor):
                for name, owned in self.watched.get(storage_id(tensor), ()):
                    self.dirty.add(id(owned))
                    if id(owned) not in self.copied:
                        self.copied.add(id(owned))  # the id stays unique: the copy keeps the tensor alive
                        self.copies.append(TensorCopy(name, owned, owned.detach().clone()))


class _UncompiledWriteMode(TensorWriteMode):
    """The mode for processes with the compiler loaded: a model that compiles parts of itself must not compile it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a kernel."""
        return self.run(func, args, kwargs or {})


def make_write_mode() -> TensorWriteMode:
    """Return the mode for this process, with or without the compiler loaded."""
    return _UncompiledWriteMode() if "torch._dynamo" in sys.modules else TensorWriteMode()


def _written_arguments(func: Any) -> tuple[int | str, ...]:
    """Return positions and names of the arguments a kernel writes; a kernel from outside torch may write any."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return ()
    foreign = not str(schema.name).startswith(("aten::", "prim::", "prims::"))
    found: list[int | str] = []
    for index, argument in enumerate(schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or foreign or argument.name in _UNDECLARED:
            found += [index, argument.name]
    return tuple(found)


def restore_tensor(copy: TensorCopy) -> None:
    """Restore the contents of a tensor."""
    now, before = copy.tensor.detach(), copy.before
    strides = now.stride() if now.layout == torch.strided else ()
    overlaps = any(stride == 0 and size > 1 for stride, size in zip(strides, now.shape, strict=False))
    if not overlaps or not torch.equal(now, before):  # a self-overlapping tensor cannot be copied to
        copy.tensor.data.copy_(before)


def _at(args: tuple[Any, ...], index: int) -> Any:
    return args[index] if index < len(args) else None


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage while it is alive; 0 for a tensor without one."""
    if tensor.device.type == "meta":
        return 0
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # sparse and other tensors without a storage
        return 0


# Predicates for tensors whose contents are not computed yet, registered by the modules that make such tensors.
deferred_checks: list[Callable[[torch.Tensor], bool]] = []


def has_contents(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has contents to copy: not on the meta device, and not deferred."""
    return tensor.device.type != "meta" and not any(is_deferred(tensor) for is_deferred in deferred_checks)


def model_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield all tensors of a model, each once: parameters, buffers, and those in plain attributes."""
    seen: set[int] = set()
    attributes = (
        (f"{name}.{key}", leaf)
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, (torch.Tensor, list, tuple)) or (isinstance(value, dict) and key not in _INTERNAL)
        for _, leaf in walk(value)
    )
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *attributes):
        if isinstance(tensor, torch.Tensor) and id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


_INTERNAL = frozenset(vars(nn.Module()))
