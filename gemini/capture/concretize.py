"""Concretization: torch functions whose result is not a tensor, and how a graph records each.

A size becomes a traced number. A read of tensor contents (`bool(mask.all())`, `n.item()`) becomes a guard. Metadata
that the input signature fixes (dtype, device, rank) is not recorded. Functions that pass memory to other libraries
are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from gemini.capture.dynamic_shapes import DynamicShape
from gemini.capture.meta_values import NoMetaValue, compute_on_cpu
from gemini.ir.encode import LITERALS, strip, tensors, walk
from gemini.ir.node import Node
from gemini.ir.pytree import Form, Number, Ref, leaves, refs
from gemini.ir.symint import Expr, make_traced

SIZES = frozenset({"size", "shape", "numel", "nelement", "stride", "storage_offset", "__len__"})
READS = frozenset({"item", "__bool__", "__int__", "__float__", "__index__", "__complex__", "is_nonzero"})
REFUSED = frozenset(
    [
        "numpy",
        "__array__",
        "__array_wrap__",
        "__dlpack__",
        "data_ptr",
        "storage",
        "untyped_storage",
        "backward",
        "grad",
        "__cuda_array_interface__",
        "apply_",
        "map_",
        "map2_",
        "register_hook",
        "register_post_accumulate_grad_hook",
        "share_memory_",
        "set_",
    ]
)
STATIC = frozenset(
    [
        "dim",
        "ndim",
        "ndimension",
        "dtype",
        "device",
        "layout",
        "type",
        "is_floating_point",
        "is_complex",
        "is_signed",
        "is_inference",
        "is_neg",
        "is_conj",
        "is_leaf",
        "requires_grad",
        "is_cuda",
        "is_cpu",
        "is_meta",
        "is_sparse",
        "is_sparse_csr",
        "is_quantized",
        "is_nested",
        "is_mkldnn",
        "is_mps",
        "is_xpu",
        "is_xla",
        "is_ipu",
        "is_vulkan",
        "is_maia",
        "is_mtia",
        "grad_fn",
        "_grad_fn",
        "output_nr",
        "names",
        "has_names",
        "element_size",
        "itemsize",
        "get_device",
        "result_type",
        "can_cast",
        "promote_types",
        "is_same_size",
        "__repr__",
        "__str__",
        "__format__",
        "__hash__",
        "__dir__",
        "retain_grad",
        "retains_grad",
        "_backward_hooks",
        "_version",
        "is_shared",
        "is_pinned",
        "is_distributed",
        "name",
        "_base",
        "is_coalesced",
        "dense_dim",
        "sparse_dim",
        "is_set_to",
        "_is_view",
        "is_inference_mode_enabled",
    ]
)
LIKE = frozenset(  # they read only size and dtype of the first tensor
    ["zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full"]
)
PARTS = frozenset({"unbind", "split", "chunk", "tensor_split"})
_METADATA = frozenset({"is_contiguous"})  # facts about memory, not about contents
_TENSOR_READS = frozenset({"size", "numel", "stride", "storage_offset"})


class ReadRecorder(Protocol):
    """The part of the tracer that records reads."""

    nodes: list[Node]
    dynamic: dict[Ref, DynamicShape]
    disguise: Callable[[Any, Expr], Any] | None

    def origin(self, tensor: torch.Tensor) -> Ref:
        """Return the node a tensor came from."""

    def guard(self, expr: Expr, expected: Any, concrete: bool = False) -> None:
        """Record a guard."""

    def on_compare(self, expr: Expr, outcome: bool) -> None:
        """Record a comparison."""

    def on_concretize(self, expr: Expr, value: int | float) -> None:
        """Record a traced number that became plain."""

    def on_hash(self, expr: Expr) -> None:
        """Record that a traced number was looked up in a table."""

    def refuse(self, reason: str) -> NoReturn:
        """Refuse to trace the current region."""


def short_name(name: str) -> str:
    """`torch.Tensor.shape.__get__` → `shape`, `torch.Tensor.requires_grad.__set__` → `requires_grad=`."""
    *_, owner, last = ["", *name.split(".")] if name else ["", ""]
    if last == "__get__":
        return owner
    return f"{owner}=" if last == "__set__" else last


def expr_data_refs(expr: Any, dynamic: Mapping[Ref, DynamicShape]) -> Iterator[Ref]:
    """Yield the tensors whose contents, not only sizes, an expression depends on.

    `dynamic`: the tensors whose sizes depend on contents; reading such a size reads these contents.
    """
    if not isinstance(expr, Expr):
        return
    if expr.op == "item":
        yield expr.operands[0]
    elif expr.op in _TENSOR_READS:
        found = dynamic.get(expr.operands[0])
        if found is not None and (expr.op != "size" or found.is_dynamic(expr.operands[1])):
            yield from found.causes
    elif expr.op == "call":
        if short_name(expr.operands[0]) not in _METADATA:
            for part in expr.operands[1:]:
                yield from refs(part)
    else:
        for part in expr.operands:
            yield from expr_data_refs(part, dynamic)


def undeclared_writes(name: str, args: Any, kwargs: Any) -> list[int]:
    """Return the indices of tensors an op writes without a new version: the statistics of batch normalization."""
    if not name.endswith("batch_norm") or not (kwargs.get("training") or (len(args) > 5 and args[5])):
        return []
    inputs = [tensor for _, tensor in tensors((args, kwargs))]
    first = 3 if name == "torch.batch_norm" else 1
    named = (kwargs.get("running_mean"), kwargs.get("running_var"), *args[first : first + 2])
    return [at for at, tensor in enumerate(inputs) if any(tensor is one for one in named)]


def data_refs(form: Form, dynamic: Mapping[Ref, DynamicShape]) -> Iterator[Ref]:
    """Yield the tensors whose contents a form depends on."""
    for leaf in leaves(form):
        if isinstance(leaf, Ref):
            yield leaf
        elif isinstance(leaf, Number):
            yield from expr_data_refs(leaf.expr, dynamic)


def content_inputs(node: Node, read: Sequence[Ref]) -> Sequence[Ref]:
    """Return those of a node's inputs whose contents determine its result."""
    if node.kind != "op" or short_name(node.target) not in LIKE:
        return read
    first = next(leaves(node.args), None)
    return [ref for ref in read if ref != first]


def holds_decision(value: Any) -> bool:
    """Return whether a result holds a bool or float on which the caller may branch."""
    return any(isinstance(leaf, (bool, float)) for _, leaf in walk(value))


def holds_number(value: Any) -> bool:
    """Return whether a result holds a plain number."""
    return any(isinstance(leaf, (bool, int, float)) for _, leaf in walk(value))


def read_size(recorder: ReadRecorder, short: str, func: Any, args: Any, kwargs: Any) -> Any:
    """Record a read of sizes; return traced numbers."""
    value = func(*strip(args), **strip(kwargs))
    ref = recorder.origin(args[0] if args else kwargs.get("input"))
    if ref in recorder.dynamic and short not in ("size", "shape"):
        return _read_dynamic(recorder, ref, short, value)
    if short == "__len__":
        recorder.guard(Expr("size", (ref, 0)), value, concrete=True)
        return value
    if short in ("numel", "nelement"):
        return make_traced(value, Expr("numel", (ref,)), recorder)
    if short == "storage_offset":
        return make_traced(value, Expr("storage_offset", (ref,)), recorder)
    op = "stride" if short == "stride" else "size"
    if isinstance(value, int):
        dim = strip(args[1] if len(args) > 1 else kwargs["dim"])
        return _number(recorder, Expr(op, (ref, dim)), value)
    parts = [_number(recorder, Expr(op, (ref, dim)), part) for dim, part in enumerate(value)]
    return torch.Size(parts) if isinstance(value, torch.Size) else tuple(parts)


def _number(recorder: ReadRecorder, expr: Expr, value: int) -> Any:
    """Return a traced size; one that depends on contents is a plain number with a guard."""
    found = recorder.dynamic.get(expr.operands[0])
    if found is None or not found.is_dynamic(expr.operands[1]):
        return make_traced(value, expr, recorder)
    recorder.guard(expr, value, concrete=True)
    return value


def _read_dynamic(recorder: ReadRecorder, ref: Ref, short: str, value: Any) -> Any:
    """Record a read that depends on all sizes of a tensor, some of which depend on contents."""
    shape = recorder.dynamic[ref].shape
    if short in ("numel", "nelement"):
        return math.prod(_number(recorder, Expr("size", (ref, dim)), size) for dim, size in enumerate(shape))
    for dim, size in enumerate(shape[:1] if short == "__len__" else shape):
        recorder.guard(Expr("size", (ref, dim)), size, concrete=True)
    return value


def read_value(recorder: ReadRecorder, func: Any, args: Any) -> Any:
    """Record a read of the contents of a one-element tensor."""
    ref = recorder.origin(args[0])
    value = func(_with_contents(recorder, ref, args[0]))
    expr = Expr("item", (ref,))
    if isinstance(value, bool):
        recorder.guard(Expr("bool", (expr,)), value)
        return value
    # A plain number with a guard: C code (a slice of a list, `math`) bypasses the methods of a traced one.
    recorder.guard(expr, value, concrete=True)
    return value


def _with_contents(recorder: ReadRecorder, ref: Ref, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device.type != "meta":
        return tensor
    try:
        return compute_on_cpu(recorder.nodes, ref)
    except NoMetaValue as cause:
        recorder.refuse(f"its Python code reads a tensor on the meta device that depends on {cause}")


def record_read(recorder: ReadRecorder, name: str, args: Form, kwargs: Form, value: Any) -> Any:
    """Record a function that returns plain Python data as a guard on its value."""
    if not _is_data_value(value):
        recorder.refuse(f"{short_name(name)} returns a {type(value).__name__}")
    recorder.guard(Expr("call", (name, args, kwargs)), value)
    return value


def _is_data_value(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_is_data_value(part) for part in value)
    return isinstance(value, LITERALS)
