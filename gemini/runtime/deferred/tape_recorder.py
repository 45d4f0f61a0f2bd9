"""Tape recorder: a call of a torch function with deferred tensors becomes an op of the tape.

Only ops that give the same result later are recorded. Ops that draw random numbers, write a tensor of the script or
memory that several values share, or have arguments that are no plain data run at once, on contents.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gemini.batch_analysis.loss_tape import Meta, Op, literal_type_key
from gemini.capture import torch_flags
from gemini.ir.autograd_modes import Region
from gemini.ir.encode import LITERALS, decode
from gemini.ir.pytree import Form, Literal, MappingForm, Ref, SequenceForm, SliceForm
from gemini.runtime.deferred.deferred_tensor import DeferredTensor
from gemini.runtime.deferred.op_metadata import OpMetadata, infer_metadata
from gemini.runtime.deferred.recorded_warnings import emit_at_caller

if TYPE_CHECKING:
    from gemini.runtime.deferred.pending_call import PendingCall


def _like_ctc_loss(  # noqa: PLR0917
    log_probs: torch.Tensor, targets: torch.Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str = "mean", zero_infinity: bool = False,
) -> torch.Tensor:  # fmt: skip
    del targets, input_lengths, target_lengths, blank, zero_infinity
    is_usual = log_probs.dim() == 3 and log_probs.dtype in (torch.float32, torch.float64)
    if not is_usual or reduction not in ("mean", "sum", "none"):
        raise _Unrecordable
    return log_probs.sum((0, 2)) if reduction == "none" else log_probs.sum()


# Ops that read contents of their arguments, or that fake tensors do not support, take their metadata from another op.
_SUBSTITUTES: dict[Any, Callable[..., Any]] = {
    torch.nn.functional.ctc_loss: _like_ctc_loss,
    torch.Tensor.data.__get__: torch.Tensor.detach,
}


_EXACT_KINDS = frozenset((type(None), bool, int, str))  # equal values of one class are the same to torch
_MOST = 64  # cached ops of one kind on other values


class _Unrecordable(Exception):
    """The arguments cannot be recorded."""


def record(pending: PendingCall, function: Any, args: Any, kwargs: Any) -> tuple[Any] | None:
    """Return the result of the function in a tuple; None, without effects, where it must run on contents."""
    given = _Arguments()
    try:
        key = given.collect((args, kwargs))
        region = Region.current()
        metas = [_meta(one) for one in given.tensors]
        kind = (function, key, tuple(metas), region, torch_flags.error_filters())
        alike = _SUBSTITUTES.get(function, function)
        facts = infer_metadata(kind, lambda fakes: given.call(alike, args, kwargs, fakes), metas)
    except (_Unrecordable, TypeError):
        return None
    if facts is None or facts.is_random:
        return None
    found = _record_op(pending, function, region, given, facts, (args, kwargs))
    if found is not None and facts.warned:
        emit_at_caller(function, facts.warned)
    return found


def _record_op(  # noqa: PLR0917
    pending: PendingCall, function: Any, region: Region, given: _Arguments, facts: OpMetadata, arguments: Any
) -> tuple[Any] | None:
    if facts.writes and not _may_write(pending, given, facts):
        return None
    if facts.plain is not None and not facts.writes:
        return facts.plain
    if facts.metas and all(at is not None for at in facts.same) and not facts.writes:
        return (_build_result(facts, given, {}),)  # only its own arguments
    real = frozenset(at for at, one in enumerate(given.tensors) if not isinstance(one, DeferredTensor))
    if any(shares & real for shares in facts.shares):
        return _view_real(function, given, facts, real, arguments)
    return (_append_op(pending, function, region, given, facts, arguments),)


def _view_real(
    function: Any, given: _Arguments, facts: OpMetadata, real: frozenset[int], arguments: Any
) -> tuple[Any] | None:
    """View a real tensor by the shape of a deferred one (`y.view_as(logits)`): contents do not matter."""
    if facts.writes or not all(shares and shares <= real for shares in facts.shares):
        return None
    shapes = [one if at in real else _empty(_meta(one)) for at, one in enumerate(given.tensors)]
    return (given.call(function, arguments[0], arguments[1], shapes),)


def _empty(meta: Meta) -> torch.Tensor:
    return torch.empty((), dtype=meta.dtype, device=meta.device).expand(meta.shape)


def _append_op(  # noqa: PLR0917
    pending: PendingCall, function: Any, region: Region, given: _Arguments, facts: OpMetadata, arguments: Any
) -> Any:
    tape = pending.tape
    numbers = [pending.value_number(tensor) for tensor in given.tensors]

    def add(results: tuple[int, ...], writes: int | None = None) -> None:
        key = (function, *numbers, results, writes)
        op = facts.ops.get(key)
        if op is None:
            if len(facts.ops) >= _MOST:
                facts.ops.clear()
            op = facts.ops[key] = Op(function, given.form(arguments, numbers), region, results, writes)
        tape.ops.append(op)

    if facts.writes:
        (target,) = facts.writes
        number = pending.new_value(facts.written[0], ())
        pending.nodes[number] = facts.nodes[0]
        add((number,), numbers[target])
        written = given.tensors[target]
        assert isinstance(written, DeferredTensor)
        pending.rebind(written, number)
        return _build_result(facts, given, {})
    made: dict[int, DeferredTensor] = {}
    results = []
    for at, meta in enumerate(facts.metas):
        if (same := facts.same[at]) is not None:
            results.append(numbers[same])
            continue
        number = pending.new_value(meta, [numbers[one] if one >= 0 else -len(tape.ops) - 1 for one in facts.shares[at]])
        results.append(number)
        pending.nodes[number] = facts.nodes[at]
        made[at] = pending.make(number, meta)
    add(tuple(results))
    return _build_result(facts, given, made)


def _build_result(facts: OpMetadata, given: _Arguments, made: dict[int, DeferredTensor]) -> Any:
    def read(ref: Ref) -> torch.Tensor:
        same = facts.same[ref.node]
        return made[ref.node] if same is None else given.tensors[same]

    return decode(facts.form, read)


def _may_write(pending: PendingCall, given: _Arguments, facts: OpMetadata) -> bool:
    """Whether the op writes one deferred tensor whose memory is unaliased, and returns nothing else."""
    if len(facts.writes) != 1 or any(at != facts.writes[0] for at in facts.same):
        return False
    target = given.tensors[facts.writes[0]]
    if not isinstance(target, DeferredTensor) or target._real is not None:
        return False
    now, before = facts.written[0], pending.tape.metas[target._value]
    is_alike = (now.shape, now.dtype, now.strides) == (before.shape, before.dtype, _meta(target).strides)
    # The object cannot begin to require a gradient: its metadata is fixed.
    return is_alike and now.requires_grad == before.requires_grad and pending.is_unaliased(target._value)


def _meta(tensor: torch.Tensor) -> Meta:
    if isinstance(tensor, DeferredTensor):
        with torch._C.DisableTorchFunctionSubclass():
            return Meta.of(tensor)
    return Meta.of(tensor)


class _Arguments:
    """The tensors among some arguments, and the arguments without them."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._place: dict[int, int] = {}

    def collect(self, value: Any) -> Any:
        """Collect the tensors of nested arguments; returns a key of their structure."""
        kind = type(value)
        if kind in _EXACT_KINDS:  # the usual case
            return kind, value
        if isinstance(value, torch.Tensor):
            return ("tensor", self._add(value))
        if kind is tuple or kind is list or kind is torch.Size:
            return (kind, *map(self.collect, value))
        if kind is dict:
            return (kind, *((key, self.collect(part)) for key, part in value.items()))
        if kind is slice:
            return (kind, *(self.collect(part) for part in (value.start, value.stop, value.step)))
        if kind in LITERALS or isinstance(value, (torch.dtype, torch.memory_format)):
            return literal_type_key(value), value
        raise _Unrecordable

    def _add(self, tensor: torch.Tensor) -> int:
        at = self._place.get(id(tensor))
        if at is not None:
            return at
        real = tensor._real if isinstance(tensor, DeferredTensor) and tensor._real is not None else tensor
        if type(real) not in (torch.Tensor, torch.nn.Parameter, DeferredTensor) or not _is_usual(real):
            raise _Unrecordable
        self._place[id(tensor)] = len(self.tensors)
        self.tensors.append(real)
        return len(self.tensors) - 1

    def _map(self, value: Any, read: Callable[[int], Any]) -> Any:
        if isinstance(value, torch.Tensor):
            return read(self._place[id(value)])
        kind = type(value)
        if kind is tuple or kind is list:
            return kind(self._map(part, read) for part in value)
        if kind is dict:
            return {key: self._map(part, read) for key, part in value.items()}
        if kind is slice:
            return slice(*(self._map(part, read) for part in (value.start, value.stop, value.step)))
        return value

    def call(self, function: Any, args: Any, kwargs: Any, tensors: list[torch.Tensor]) -> Any:
        """Call the function with other tensors."""
        args, kwargs = self._map((args, kwargs), tensors.__getitem__)
        return function(*args, **kwargs)

    def form(self, value: Any, numbers: list[int]) -> Form:
        """Return the nested arguments with value numbers for tensors."""
        if isinstance(value, torch.Tensor):
            return Ref(numbers[self._place[id(value)]])
        kind = type(value)
        if kind is tuple or kind is list or kind is torch.Size:
            return SequenceForm(kind, tuple(self.form(part, numbers) for part in value))
        if kind is dict:
            return MappingForm(dict, tuple((key, self.form(part, numbers)) for key, part in value.items()))
        if kind is slice:
            return SliceForm(*(self.form(part, numbers) for part in (value.start, value.stop, value.step)))
        return Literal(value)


def _is_usual(tensor: torch.Tensor) -> bool:
    if isinstance(tensor, DeferredTensor):
        return True
    return tensor.layout is torch.strided and not (
        tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg()
    )
