"""Op metadata: shapes, dtypes and aliasing of an op's results, without running it on contents.

The op runs once on fake tensors, which obey all of torch's rules: promotion, broadcasting, autocast, gradient modes,
views. The result is cached by op and metadata of its arguments, so a step costs one look-up per op. An op that needs
contents fails on fake tensors, and is not recorded.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gemini.autograd_engine import grad_fn_name
from gemini.batch_analysis.loss_tape import Meta, Op
from gemini.ir.pytree import Form
from gemini.random_numbers.random_ops import is_random_op
from gemini.runtime.deferred.contract import flatten_output
from gemini.runtime.deferred.recorded_warnings import collect_warnings

_MOST = 4096  # cached ops: literals that change in every step would fill the memory
_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, torch.layout)
_known: dict[Hashable, OpMetadata | None] = {}
_unknown: Any = object()
_fake: list[FakeTensorMode] = []


@dataclass(frozen=True)
class OpMetadata:
    """Metadata of an op for arguments of given metadata; argument tensors are identified by position."""

    form: Form  # of the returned value; Ref.node is the place among `metas`
    metas: tuple[Meta, ...]  # of the returned tensors
    same: tuple[int | None, ...]  # for each of these, the argument that it is, if any
    shares: tuple[frozenset[int], ...]  # for each, the arguments whose memory it shares
    writes: tuple[int, ...]  # the arguments that are written
    written: tuple[Meta, ...]  # their metadata afterwards
    is_random: bool
    plain: tuple[Any] | None  # the returned value, where it holds no tensor
    nodes: tuple[str, ...] = ()  # grad_fn names of the tensors that it returns or writes
    warned: list[warnings.WarningMessage] = field(default_factory=list, compare=False)  # emitted by every call
    ops: dict[Hashable, Op] = field(default_factory=dict, compare=False)  # cached ops, by numbers of values


def infer_metadata(key: Hashable, run: Callable[[list[torch.Tensor]], Any], metas: list[Meta]) -> OpMetadata | None:
    """Return the metadata of the op that `run` applies to tensors; None where it depends on contents."""
    found: OpMetadata | None = _known.get(key, _unknown)
    if found is _unknown:
        if len(_known) >= _MOST:
            _known.clear()
        try:
            with _mute_fake_tensor_log():
                found = _infer(run, metas)
        except Exception:  # the error appears when the op runs on contents
            found = None
        _known[key] = found
    return found


@contextmanager
def _mute_fake_tensor_log() -> Iterator[None]:
    """Silence torch's log of failures on fake tensors: the error appears when the op runs on contents."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _infer(run: Callable[[list[torch.Tensor]], Any], metas: list[Meta]) -> OpMetadata | None:
    warned: list[warnings.WarningMessage] = []
    if not _fake:
        _fake.append(FakeTensorMode())
    with torch._C.DisableTorchFunctionSubclass(), _fake[0]:
        given = [_make_fake(meta) for meta in metas]
        before = [_memory(one) for one in given]
        with _WriteRecorder() as watch:
            returned = collect_warnings(lambda: run(given), warned)
        writes = tuple(at for at, one in enumerate(before) if one in watch.written)
        after = tuple(Meta.of(given[at]) for at in writes)
        form, found = flatten_output(returned)
        if not found:
            if not writes and not _is_plain(returned):
                return None
            nodes = tuple(grad_fn_name(given[at]) for at in writes)
            return OpMetadata(form, (), (), (), writes, after, watch.is_random, (returned,), nodes, warned)
        if any(one.layout is not torch.strided or one.device.type == "meta" for one in found):
            return None
        places = {id(one): at for at, one in enumerate(given)}
        memory = [_memory(one) for one in found]
        shares = tuple(frozenset(at for at, one in enumerate(before) if one == mine) for mine in memory)
        if len(set(memory)) < len(memory) and not any(shares):  # parts of one new tensor
            shares = tuple(frozenset({-1}) for _ in memory)
        same = tuple(places.get(id(one)) for one in found)
        nodes = tuple(map(grad_fn_name, found))
        made = tuple(map(Meta.of, found))
        return OpMetadata(form, made, same, shares, writes, after, watch.is_random, None, nodes, warned)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _make_fake(meta: Meta) -> torch.Tensor:
    if meta.strides is None:
        made = torch.empty(meta.shape, dtype=meta.dtype, device=meta.device)
    else:
        made = torch.empty_strided(meta.shape, meta.strides, dtype=meta.dtype, device=meta.device)
    if not meta.requires_grad:
        return made
    # No leaf: leaves may not be written.
    with torch.enable_grad():
        return _NonLeaf.apply(made.requires_grad_())


class _NonLeaf(torch.autograd.Function):  # type: ignore[misc]
    """A tensor of the same metadata that is neither a leaf nor a view."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return a new tensor."""
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:  # noqa: ARG004
        """Never called."""
        return gradient


def _memory(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


class _WriteRecorder(TorchDispatchMode):  # type: ignore[misc]
    """Records which memory is written, and whether random numbers are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.written: set[int] = set()
        self.is_random = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.is_random |= is_random_op(func)
        # Its schema does not declare writes of the running averages.
        hidden = "batch_norm" in func.__name__ and "backward" not in func.__name__
        for at, argument in enumerate(func._schema.arguments):
            value = args[at] if at < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written or (hidden and "running" in argument.name):
                for one in value if isinstance(value, (list, tuple)) else [value]:
                    if isinstance(one, torch.Tensor):
                        self.written.add(_memory(one))
        return func(*args, **kwargs)
