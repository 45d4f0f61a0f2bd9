"""A deferred tensor: shape, dtype and device are known, contents are not.

To the script it is a tensor. Ops on it are recorded (`tape_recorder`) until contents are needed:

    pending    ──►  an op is recorded; its results are deferred tensors
        │ read, backward, flush
        ▼
    real       ──►  the object itself becomes the ordinary tensor where torch permits it (see `become`);
                    otherwise it forwards every use to that tensor

Ops on deferred tensors reach `__torch_function__`. Ops that bypass it (a C++ extension) reach `__torch_dispatch__`,
which computes on real contents; gradients that arrive at the deferred object are routed to the real tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from gemini.runtime.retained_inputs import is_retained
from gemini.snapshot.tensor_writes import deferred_checks

if TYPE_CHECKING:
    from gemini.batch_analysis.loss_tape import Meta
    from gemini.runtime.deferred.pending_call import PendingCall


def _of_tensor(names: str) -> set[Any]:
    """Attributes (as `.name`) and methods of Tensor that this version of torch has."""
    found = set()
    for name in names.split():
        one = getattr(torch.Tensor, name.removeprefix("."), None)
        if one is not None:
            found.add(one.__get__ if name.startswith(".") else one)
    return found


# Answered from metadata.
_KNOWN = _of_tensor(
    ".shape .dtype .device .layout .ndim .requires_grad .is_cuda .is_cpu .is_sparse .is_sparse_csr .is_quantized "
    ".is_meta .is_nested .is_mkldnn .is_mps .is_xpu .itemsize .nbytes .names size dim numel nelement stride "
    "element_size is_floating_point is_complex is_signed __len__ ndimension is_contiguous get_device is_inference"
) | {torch.is_floating_point, torch.is_complex, torch.numel}
_IS_LEAF = torch.Tensor.is_leaf.__get__
# Uses of its place in the graph, for which contents do not suffice.
_PLACE = _of_tensor(
    ".grad_fn .grad .retains_grad .output_nr ._backward_hooks ._base _is_view register_hook retain_grad "
    "requires_grad_ register_post_accumulate_grad_hook detach_"
)
# Those that only read: no gradient flows through them.
_LOOKS = _of_tensor(".grad_fn .grad .retains_grad .output_nr ._backward_hooks ._base _is_view")
_READS = _of_tensor(
    ".__cuda_array_interface__ item tolist numpy __bool__ __float__ __int__ __index__ __complex__ data_ptr "
    "__repr__ __format__ __array__ __reduce_ex__ __deepcopy__ __contains__ untyped_storage storage share_memory_ "
    "is_shared pin_memory is_pinned __dlpack__ storage_offset equal"
) | {torch.equal}


# The dispatch state of torch outside any op.
CLEAN = functools.partial(
    torch._C._ForceDispatchKeyGuard,
    torch._C._dispatch_tls_local_include_set(),
    torch._C._dispatch_tls_local_exclude_set(),
)


_Meta: Any = type(torch.Tensor)
_set_class: Callable[[object, type], None] = vars(object)["__class__"].__set__


class _TensorLikeMeta(_Meta):  # type: ignore[misc]
    """Metaclass of DeferredTensor: the class is named `torch.Tensor` and compares equal to it.

    Scripts distinguish a hidden state from a pair by `type(hidden) == torch.Tensor`, and print types. `isinstance` is
    right anyway, and so is `x.__class__`. The result of `type(x)` is another object than torch.Tensor: instrumented
    code calls `public_type` instead.
    """

    def __new__(cls, name: str, bases: tuple[type, ...], own: dict[str, Any]) -> Any:
        made = super().__new__(cls, name, bases, own)
        made.__name__, made.__qualname__, made.__module__ = "Tensor", "Tensor", "torch"
        return made

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is torch.Tensor

    def __ne__(cls, other: object) -> bool:
        return other is not cls and other is not torch.Tensor

    # The hash differs from that of torch.Tensor: torch collects classes with a `__torch_function__` in a set, and would
    # call only one of two equal ones.
    __hash__ = type.__hash__


class DeferredTensor(torch.Tensor, metaclass=_TensorLikeMeta):  # type: ignore[misc]
    """A tensor whose contents are still to be computed."""

    _pending: PendingCall | None
    _value: int
    _real: torch.Tensor | None
    _held: bool  # C++ code refers to this object: it cannot become another
    _routed: bool  # gradients that arrive are routed to the real tensor

    @property  # type: ignore[misc]  # read-only: `become` sets the class
    def __class__(self) -> type[torch.Tensor]:
        """The class that the script sees."""
        seen: type[torch.Tensor] = torch.Tensor
        return seen

    @staticmethod
    def make(pending: PendingCall, value: int, meta: Meta) -> DeferredTensor:
        """Create the tensor of a value of a pending call's tape."""
        made: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            DeferredTensor,
            meta.shape,
            strides=meta.strides,
            dtype=meta.dtype,
            device=meta.device,
            requires_grad=meta.requires_grad,
        )
        made._pending, made._value, made._real = pending, value, None
        made._held = made._routed = False
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer from metadata, record, or compute on real tensors."""
        kwargs = kwargs or {}
        if func in _KNOWN and args and isinstance(args[0], DeferredTensor) and args[0]._real is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is _IS_LEAF or func == _IS_LEAF:
            return _is_leaf(args[0])
        if special := OVERRIDES.get(func):
            return special(*args, **kwargs)
        found = list(find_deferred((args, kwargs)))
        if func in _PLACE:
            for one in found:
                graph_tensor(one, read_only=func in _LOOKS)
            return on_real(func, args, kwargs)
        waiting = _pending_calls(found)
        if len(waiting) > 1:  # values of completed steps, such as a metric's sums, must not force the next step
            for one in found:
                if one._real is None and one._pending is not None and one._pending.state != "waiting":
                    materialize(one)
            waiting = _pending_calls(found)
        if len(waiting) == 1 and func not in _READS and _may_record(types, func):
            (pending,) = waiting.values()
            assert pending is not None
            recorded = pending.record(func, args, kwargs)
            if recorded is not None:
                return recorded[0]
        written = [(one._pending, one._value) for one in found if one._pending is not None and _writes(func, kwargs)]
        for one in found if written else ():
            # It may have become real together with another.
            if type(one) is DeferredTensor and one._pending is not None:
                one._pending.write(one)
        for one in found:
            # Results will be differentiated, unless the op only reads.
            _real_for_graph(one) if func not in _READS else materialize(one)
        for pending, value in written:
            pending.publish_dependents(value)
        return on_real(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute ops that bypassed `__torch_function__` on contents; autograd holds the deferred object as input."""
        args, kwargs = replace_deferred((args, kwargs or {}), _contents)
        return func(*args, **kwargs)


def _pending_calls(found: list[DeferredTensor]) -> dict[int, PendingCall | None]:
    return {id(one._pending): one._pending for one in found if type(one) is DeferredTensor and one._real is None}


# Scripts assign them to attributes of a model, as metrics do: saving its state must not compute them.
deferred_checks.append(lambda tensor: type(tensor) is DeferredTensor and tensor._real is None)


def materialize(tensor: torch.Tensor) -> torch.Tensor:
    """Return the real tensor, for its contents. A function: a method would hide one of Tensor."""
    if type(tensor) is DeferredTensor and tensor._real is None:
        assert tensor._pending is not None
        tensor._pending.read(tensor._value)
    if type(tensor) is not DeferredTensor:
        return tensor  # it has become an ordinary tensor
    assert tensor._real is not None
    return tensor._real


def _real_for_graph(tensor: DeferredTensor) -> torch.Tensor:
    is_waiting = type(tensor) is DeferredTensor and tensor._pending is not None and tensor._pending.state == "waiting"
    return (
        graph_tensor(tensor) if is_waiting and tensor.requires_grad and torch.is_grad_enabled() else materialize(tensor)
    )


def graph_tensor(tensor: torch.Tensor, *, read_only: bool = False) -> torch.Tensor:
    """Return the real tensor as a part of the autograd graph."""
    if type(tensor) is DeferredTensor and tensor._pending is not None:
        tensor._pending.join(tensor, read_only=read_only)
    return materialize(tensor)


def become(tensor: DeferredTensor, real: torch.Tensor, *, for_good: bool = True) -> torch.Tensor:
    """Replace a deferred tensor by a real one; `for_good`: by becoming that object.

    Returns the object that is the real tensor afterwards; use no other.
    """
    # C++ code that refers to the object (a checkpoint that saves it) would be left with an empty one.
    is_held = tensor._held or torch.Tensor._use_count(tensor) > 1
    is_free = not is_held and type(real) is torch.Tensor and not real._backward_hooks and not is_retained(real)
    if for_good and is_free:
        try:
            torch._C._swap_tensor_impl(tensor, real)
        except RuntimeError:  # C++ code refers to it
            pass
        else:
            del tensor._pending, tensor._value, tensor._real, tensor._held, tensor._routed
            _set_class(tensor, torch.Tensor)
            return tensor
    tensor._real = real
    if for_good:
        tensor._pending = None
    return real


def public_type(value: object) -> type:
    """Return `type(value)`, for a deferred tensor that of the tensor it stands for."""
    found: type = type(value)
    return torch.Tensor if found is DeferredTensor else found


def _contents(tensor: DeferredTensor) -> torch.Tensor:
    """Return contents for code below autograd, which holds the deferred object itself as an input."""
    tensor._held = True
    with CLEAN():  # torch has disabled dispatch keys that a call of the model needs
        materialize(tensor)
    if type(tensor) is not DeferredTensor:
        return tensor
    _route_gradients(tensor)
    assert tensor._real is not None
    return tensor._real.detach()


def _route_gradients(tensor: DeferredTensor) -> None:
    """Route gradients that arrive at the object, which autograd treats as a leaf, to the real tensor."""
    real = tensor._real
    if tensor._routed or real is None or not real.requires_grad:
        return
    tensor._routed = True

    def send_on(leaf: torch.Tensor) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            gradient, leaf.grad = leaf.grad, None
        torch.autograd.backward([real], [gradient], retain_graph=True)

    with torch._C.DisableTorchFunctionSubclass():
        tensor.register_post_accumulate_grad_hook(send_on)


# Functions with their own treatment of deferred tensors: `deferred_backward` adds `torch.autograd.grad`.
OVERRIDES: dict[Any, Callable[..., Any]] = {}


_USUAL = (DeferredTensor, torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _may_record(types: Any, func: Any) -> bool:
    if getattr(func, "__name__", "") in ("__set__", "__delete__"):
        return False
    if torch._C._are_functorch_transforms_active():
        return False
    return all(one in _USUAL for one in types)


_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
_ASSIGNING = {"__setitem__", *(f"__i{one}__" for one in _OPERATORS)}


def _writes(func: Any, kwargs: Any) -> bool:
    """Whether a function writes one of its arguments, by torch's naming rules."""
    name = getattr(func, "__name__", "")
    by_name = name in _ASSIGNING or (name.endswith("_") and not name.startswith("__"))
    return by_name or bool(kwargs.get("inplace")) or kwargs.get("out") is not None


def _is_leaf(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, DeferredTensor) and tensor._real is None:
        return not tensor.requires_grad
    return bool(materialize(tensor).is_leaf)


def on_real(func: Any, args: Any, kwargs: Any) -> Any:
    """Call a function on real tensors; if it returns one of its arguments, return the script's object."""
    objects: dict[int, DeferredTensor] = {}

    def real(one: DeferredTensor) -> torch.Tensor:
        found = materialize(one)
        objects[id(found)] = one
        return found

    args, kwargs = replace_deferred((args, kwargs), real)
    result = func(*args, **kwargs)
    return objects.get(id(result), result) if isinstance(result, torch.Tensor) else result


def find_deferred(value: Any) -> Iterator[DeferredTensor]:
    """Yield all deferred tensors in nested sequences and dictionaries."""
    if isinstance(value, DeferredTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from find_deferred(part)
    elif isinstance(value, dict):
        for part in value.values():
            yield from find_deferred(part)


def replace_deferred(value: Any, new: Callable[[DeferredTensor], Any]) -> Any:
    """Replace the deferred tensors in nested sequences and dictionaries.

    A container without any is returned as the same object: a model may modify it, and the caller sees that.
    """
    if isinstance(value, DeferredTensor):
        return new(value)
    if not isinstance(value, (list, tuple)) and type(value) is not dict:
        return value
    if not any(True for _ in find_deferred(value)):
        return value
    if isinstance(value, dict):
        return {key: replace_deferred(part, new) for key, part in value.items()}
    parts = [replace_deferred(part, new) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
