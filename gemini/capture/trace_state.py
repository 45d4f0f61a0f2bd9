"""Trace state: the nodes recorded so far, and the origin of every tensor that the model's Python may hold.

Tensors are identified by object identity. A tensor without an origin is refused by raising `TraceRefused`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from gemini.capture import concretize
from gemini.capture.dynamic_shapes import DynamicShape, dynamic_sizes, resize_cases
from gemini.capture.graph_guards import finite_check_operand
from gemini.capture.leaf_policy import LeafPolicy
from gemini.capture.provenance import ModelIndex, TensorTable
from gemini.capture.scaling_reads import READS_SAMPLE_COUNTS, ScalingReadWatcher
from gemini.capture.source_location import call_candidates, source_line
from gemini.capture.storage_aliases import StorageTable
from gemini.ir.autograd_modes import Region
from gemini.ir.encode import Encoder, UnsupportedValueError, tensors
from gemini.ir.node import Guard, Node, TensorMeta
from gemini.ir.pytree import Form, Path, Ref
from gemini.ir.symint import Expr
from gemini.snapshot.rng_snapshot import host_rng_fingerprint

_MAX_OPS = 2000


class TraceRefused(BaseException):  # a BaseException: it must pass through `except Exception` of the model
    """A region cannot be traced; `scope` lists the open modules, of which the innermost becomes a basic block."""

    def __init__(self, scope: tuple[str, ...], reason: str, line: str, calls: tuple[str, ...] = ()) -> None:
        super().__init__(f"{reason} ({line})")
        self.scope, self.reason, self.line, self.calls = scope, reason, line, calls
        self.released = ""  # an opaque function to trace again instead


class EscapedTensor:
    """A tensor made inside a leaf: its scope, and whether an inner module returned it."""

    def __init__(self, scope: tuple[str, ...]) -> None:
        self.scope = scope
        self.node = -1
        self.inner: Path = ()


class TraceState:
    """Nodes, guards and origins of one traced run."""

    recomputation = 0  # the number of the checkpoint whose inside is being recorded; 0: none

    def __init__(self, model: nn.Module, leaf_policy: LeafPolicy) -> None:
        self.model, self.leaf_policy = model, leaf_policy
        self.model_index = ModelIndex(model)
        self.nodes: list[Node] = []
        self.guards: dict[tuple[Any, ...], Guard] = {}
        self.known: TensorTable[Ref] = TensorTable()
        self.alive: list[Any] = []
        self.scope: list[str] = []
        self.active = False
        self.recording = True  # False inside a leaf
        self.from_weights: list[bool] = []  # per node: whether it depends on parameters
        self.values: list[list[torch.Tensor]] | None = None  # per node its tensors, if runs are compared
        self.inputs: dict[int, Path] = {}
        self.result: Form | None = None
        self.encoder = Encoder(self.origin, self.model_index.owner, self.array)
        self.dynamic: dict[Ref, DynamicShape] = {}  # tensors whose sizes depend on contents
        self.leaf_shapes: TensorTable[DynamicShape] = TensorTable()  # the same for tensors inside leaves
        self.storages = StorageTable()
        self.last_call: dict[str, int] = {}
        self.names: dict[str, int] = {}
        self.arrays: dict[int, Ref] = {}
        self.escaped: TensorTable[EscapedTensor] = TensorTable()
        self.host_rng = host_rng_fingerprint()
        self.op_counts: dict[tuple[str, ...], int] = {}  # operations a scope has run
        self.scaling_reads: ScalingReadWatcher | None = None
        self.disguise: Callable[[Any, Expr], Any] | None = None  # of traced numbers

    def release(self) -> None:
        """Release all tensors; the nodes remain."""
        self.values = None
        self.known.clear()
        self.escaped.clear()
        self.leaf_shapes.clear()
        self.arrays.clear()
        self.alive.clear()

    # ── origins of tensors ─────────────────────────────────────────────────────────────────────────────────────
    def origin(self, tensor: torch.Tensor) -> Ref:
        """Return the origin of a tensor; adds tensors of the model to the graph; refuses unknown ones."""
        ref = self.known.get(tensor)
        if ref is not None:
            return ref
        held = self.model_index.find_tensor(tensor)
        if held is not None:
            return Ref(self.source(*held, tensor))
        made = self.escaped.get(tensor)
        if made is None:
            self.refuse(f"a tensor of unknown origin, shape {tuple(tensor.shape)}")
        if not made.inner:
            self.refuse("a tensor made inside a module reaches other code, and not through a result", made.scope)
        return self.register(self.nodes[made.node], "inner", made.inner, tensor)

    def array(self, value: Any) -> Ref | None:
        """Return the origin of a NumPy array; None for a constant of the model's code."""
        if id(value) not in self.arrays and self.arrays:
            raise UnsupportedValueError("a NumPy array computed from the result of a function")
        return self.arrays.get(id(value))

    def refuse(self, reason: str, other: tuple[str, ...] | None = None) -> NoReturn:
        """Refuse the innermost region that contains both the current code and `other`."""
        scope = tuple(self.scope)
        if other is not None:
            common = [a for a, b in zip(scope, other, strict=False) if a == b]
            if len(common) < len(scope):
                raise TraceRefused(tuple(common) or ("",), reason, source_line())
        name = scope[-1] if scope else ""
        module = self.model.get_submodule(name) if name else self.model
        raise TraceRefused(scope, reason, source_line(), call_candidates(module))

    def encode(self, value: Any) -> Form:
        """Return the form of a value; refuses a value without a form."""
        try:
            return self.encoder(value)
        except UnsupportedValueError as error:
            self.refuse(f"cannot record {error}")

    # ── nodes ──────────────────────────────────────────────────────────────────────────────────────────────────
    def source(self, kind: str, name: str, tensor: torch.Tensor) -> int:
        """Add a node that brings a tensor into the graph; return its id."""
        node = Node(len(self.nodes), kind, name, name, region=Region.current())
        self.append(node, [((), tensor)], from_weights=kind == "parameter")
        return node.id

    def start(self, kind: str, stem: str, target: str, args: Form, kwargs: Form) -> Node:
        """Return a node for the current call; `append` adds it to the graph with its result."""
        count = self.names[stem] = self.names.get(stem, 0) + 1
        return Node(
            id=len(self.nodes),
            kind=kind,
            name=stem if count == 1 else f"{stem}#{count}",
            target=target,
            args=args,
            kwargs=kwargs,
            region=Region.current(),
            scope=tuple(self.scope),
            line=source_line(),
            recomputed=self.recomputation,
        )

    def append(self, node: Node, made: list[tuple[Path, torch.Tensor]], from_weights: bool) -> None:
        """Add a node to the graph with the tensors it returned."""
        self.nodes.append(node)
        self._refuse_long_loops(node)
        read = (*concretize.data_refs(node.args, self.dynamic), *concretize.data_refs(node.kwargs, self.dynamic))
        self.from_weights.append(
            from_weights or any(self.from_weights[ref.node] for ref in concretize.content_inputs(node, read))
        )
        if self.scaling_reads is not None:
            self.scaling_reads.on_append(self.from_weights[-1])
        if self.values is not None:
            self.values.append([tensor for _, tensor in made])
        for path, tensor in made:
            self.register(node, "ret", path, tensor)

    def _refuse_long_loops(self, node: Node) -> None:
        """Refuse a region whose Python loop would become thousands of nodes."""
        if node.kind == "op" and len(node.scope) > 1:
            count = self.op_counts[node.scope] = self.op_counts.get(node.scope, 0) + 1
            if count > _MAX_OPS:
                self.refuse(f"its Python code runs more than {_MAX_OPS} operations")

    def dynamic_shape(self, tensor: torch.Tensor) -> DynamicShape | None:
        """Return the dynamic shape of a tensor; None where no size depends on contents."""
        ref = self.known.get(tensor)
        return self.leaf_shapes.get(tensor) if ref is None else self.dynamic.get(ref)

    def record_sizes(self, name: str, args: Any, kwargs: Any, output: Any, leaf: tuple[Ref, ...] | None = None) -> bool:
        """Record which sizes of an op's new results depend on contents; return whether this op introduces it.

        `leaf`: the arguments of the leaf that the op ran in, if any; all of them count as the cause.
        """
        counts = False
        inputs = [self.dynamic_shape(tensor) for _, tensor in tensors((args, kwargs))]
        inherited = [cause for one in inputs if one is not None for cause in one.causes]
        for found in dynamic_sizes(name, args, kwargs, output, self.dynamic_shape):
            own = map(self.origin, found.causes) if leaf is None else leaf if found.causes else ()
            causes = tuple(dict.fromkeys((*inherited, *own)))
            counts = counts or bool(found.causes)
            self.leaf_shapes.add(found.tensor, DynamicShape(tuple(found.tensor.shape), found.other_cases, causes))
        return counts

    def register(self, node: Node, source: str, path: Path, tensor: torch.Tensor) -> Ref:
        """Register a tensor as this result of `node`."""
        ref = Ref(node.id, source, path)
        sizes = self.dynamic_shape(tensor)
        if sizes is not None:
            shape = tuple(tensor.shape)
            changed = shape != sizes.shape  # in place, by `squeeze_` for example
            self.dynamic[ref] = (
                DynamicShape(shape, resize_cases(shape, lambda *_: True), sizes.causes) if changed else sizes
            )
        self.known.add(tensor, ref)
        dynamic = tuple(sorted(self.dynamic[ref].dims)) if ref in self.dynamic else ()
        node.outputs[source, path] = replace(meta_of(tensor), dynamic_dims=dynamic)
        maker = self.storages.made_by(node.id, tensor)
        if maker != node.id and maker not in node.shares:
            node.shares = tuple(sorted((*node.shares, maker)))
        return ref

    def record_tensor_writes(self, node: Node, inputs: list[torch.Tensor], before: list[int]) -> None:
        """Record the tensors that a node wrote in place, and the nodes that must run before it."""
        written = [t for t, old in zip(inputs, before, strict=True) if self.storages.version(t) != old]
        node.mutates = tuple(self.origin(tensor) for tensor in written)
        node.after = tuple(sorted({*node.after, *self.storages.order(node.id, inputs, written)}))

    def name_prefix(self) -> str:
        """Return the innermost open module as the prefix of a name."""
        return f"{self.scope[-1]}." if self.scope and self.scope[-1] else ""

    def check_host_rng(self) -> None:
        """Refuse glue that used Python's or NumPy's generator since the last check."""
        if self.host_rng != host_rng_fingerprint():
            raise TraceRefused(tuple(self.scope), USES_HOST_RNG, source_line())

    # ── guards ─────────────────────────────────────────────────────────────────────────────────────────────────
    def on_compare(self, expr: Expr, outcome: bool) -> None:
        """Record a branch on traced numbers."""
        self.guard(expr, outcome)

    def on_concretize(self, expr: Expr, value: int | float) -> None:
        """Record a traced number that became plain."""
        self.guard(expr, value, concrete=True)

    def on_hash(self, expr: Expr) -> None:
        """Record nothing: a hit of a table compares the number."""

    def guard(self, expr: Expr, expected: Any, concrete: bool = False) -> None:
        """Record a guard; refuse one that depends on results of the model's parameters."""
        if not self.active or not self.recording:
            return
        read = list(concretize.expr_data_refs(expr, self.dynamic))
        if (
            any(self.from_weights[ref.node] for ref in read)
            and finite_check_operand(self.nodes, expr, expected) is None
        ):
            self.refuse(BRANCHES_ON_RESULTS)
        if self.scaling_reads is not None and (calls := self.scaling_reads.find_calls(self, expr, source_line())):
            raise TraceRefused(tuple(self.scope), READS_SAMPLE_COUNTS, source_line(), calls)
        key = (expr, repr(expected))
        if key not in self.guards:
            where = len(self.nodes), tuple(self.scope), source_line()
            self.guards[key] = Guard(expr, expected, *where, bool(read), concrete)


BRANCHES_ON_RESULTS = "its Python code branches on values the model computes"
USES_HOST_RNG = "its Python code uses Python's or NumPy's generator"


def meta_of(tensor: torch.Tensor) -> TensorMeta:
    """Return shape, dtype, device, gradient flag and strides of a tensor."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    spread = tensor.layout == torch.strided and not tensor.is_contiguous()
    strides = tuple(tensor.stride()) if spread else None
    return TensorMeta(tuple(tensor.shape), dtype, str(tensor.device), tensor.requires_grad, strides=strides)
