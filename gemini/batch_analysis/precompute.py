"""Precomputed values: computed before a step, from its inputs and the operands of its tape: targets, masks, counts.

Only deterministic ops run, those that write included. A value of which only the size is needed is not computed: sizes
follow from the number of samples. `part_of` and `split_results` divide known values among the micro-batches.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.batch_kinds import Kind, Opaque, Replicate, RowIndices, Shard, SplittingError
from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.microbatch_weights import (
    OwnRows,
    PartValue,
    SeveralWeights,
    Weight,
    WholeValue,
    WrittenValue,
)
from gemini.batch_analysis.op_call import ResultMeta, TensorValue
from gemini.batch_analysis.rules.registry import short_name
from gemini.capture.graph_guards import early_guards, finite_check_operand
from gemini.capture.trace_state import USES_HOST_RNG
from gemini.ir.autograd_modes import RegionSwitch
from gemini.ir.encode import follow
from gemini.ir.graph import Graph
from gemini.ir.hook_tables import has_hooks
from gemini.ir.interpreter import Execution
from gemini.ir.node import Guard, Node
from gemini.ir.pytree import Number, Ref, expr_refs, leaves, refs
from gemini.ir.symint import Expr
from gemini.snapshot.rng_snapshot import preserve_rng_state

_SIZES = ("size", "numel")
_LIKE = {  # ops that use only the size and type of one argument: its position
    **dict.fromkeys(("expand_as", "view_as", "reshape_as"), 1),
    **dict.fromkeys(("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full", "new_tensor"), 0),
}


def precomputable_nodes(graph: Graph, bound: dict[str, Any] | None = None) -> set[int]:
    """Return the nodes whose results can be computed before a step.

    With the arguments of a call, opaque functions are tried: they may read the size of values that have a gradient.
    """
    found: set[int] = set()
    for node in graph.nodes:
        if node.is_source or (
            _is_plain(graph, node)
            and all(index in found for index in _needs(graph, node, sizes=True))
            and (not _size_only_inputs(graph, node) or _reads_sizes_only(graph, node, bound))
        ):
            found.add(node.id)
    return found


def _size_only_inputs(graph: Graph, node: Node) -> set[int]:
    """Return the values with gradient among the arguments of an opaque function: only their size is available."""
    if node.kind != "call":
        return set()
    given = {ref for ref in node.inputs() if _is_sized(graph, ref)}
    return {ref.node for ref in given if graph.meta(ref).requires_grad}


def _reads_sizes_only(graph: Graph, node: Node, bound: dict[str, Any] | None) -> bool:
    if bound is None:
        return False
    try:
        with preserve_rng_state():
            Precomputed(graph, bound, Tape(0, [])).run(node.id)
    except Exception:  # it reads contents
        return False
    return True


def _is_plain(graph: Graph, node: Node) -> bool:
    """Return whether a node only computes: an op, an opaque function, or a layer without weights."""
    if (node.changes and node.kind != "op") or node.role:  # a role means other work on the whole batch
        return False
    if node.random:
        return uses_host_rng(graph, node)
    if node.kind == "module":
        module = graph.bound_model().get_submodule(node.target)
        return next(iter((*module.parameters(), *module.buffers())), None) is None and not has_hooks(module)
    return node.kind in ("op", "call")


def uses_host_rng(graph: Graph, node: Node) -> bool:
    """Return whether a node is a function that uses Python's or NumPy's generator."""
    return node.kind == "call" and node.random and graph.calls.get(node.target, "").startswith(USES_HOST_RNG)


def data_closure(graph: Graph, nodes: Sequence[int], *, sizes: bool = False) -> set[int]:
    """Return these nodes and all whose contents they depend on; with `sizes`, without those read only for size."""
    needed: set[int] = set()
    waiting = list(nodes)
    while waiting:
        index = waiting.pop()
        if index not in needed:
            needed.add(index)
            waiting += _needs(graph, graph.nodes[index], sizes=sizes)
    return needed


def random_guards(graph: Graph) -> list[Guard]:
    """Return the guards whose outcome depends on random numbers, except tests for finite values."""
    found = []
    for guard in graph.guards:
        if finite_check_operand(graph.nodes, guard.expr, guard.expected) is not None:
            continue
        read = [ref.node for ref in expr_refs(guard.expr)] if guard.data else []
        if any(graph.nodes[at].random for at in data_closure(graph, read)):
            found.append(guard)
    return found


def _needs(graph: Graph, node: Node, *, sizes: bool = False) -> set[int]:
    """Return the nodes that must have run before one: those whose contents it reads, and those that wrote them."""
    if sizes and (size_only := _size_only_inputs(graph, node)):
        # A write to values with gradient writes nothing else that is known before the step.
        late = {at for at in node.after if not _writes_gradients(graph, graph.nodes[at])}
        return ({ref.node for ref in node.inputs()} | late) - size_only
    forms = [leaf for form in (node.args, node.kwargs) for leaf in leaves(form)]
    ignored = _only_for_its_size(graph, node)
    return {ref.node for leaf in forms if leaf is not ignored for ref in _contents(graph, leaf)} | set(node.after)


def _writes_gradients(graph: Graph, node: Node) -> bool:
    return bool(node.mutates) and all(graph.meta(ref).requires_grad for ref in node.mutates)


def _only_for_its_size(graph: Graph, node: Node) -> Ref | None:
    """Return a tensor of which an op uses only size and type."""
    place = _LIKE.get(short_name(node.target)) if node.kind == "op" else None
    given = getattr(node.args, "items", ())
    ref = given[place] if place is not None and len(given) > place else None
    return ref if isinstance(ref, Ref) and _is_sized(graph, ref) and given.count(ref) == 1 else None


def _contents(graph: Graph, leaf: Any) -> Iterator[Ref]:
    if isinstance(leaf, Ref):
        yield leaf
    elif isinstance(leaf, Number):
        yield from _contents(graph, leaf.expr)
    elif isinstance(leaf, Expr):
        if leaf.op in _SIZES and _is_sized(graph, leaf.operands[0]):
            return
        for part in leaf.operands:
            yield from _contents(graph, part)
    elif not isinstance(leaf, (int, float, str, tuple)):
        yield from refs(leaf)


def _is_sized(graph: Graph, ref: Ref) -> bool:
    """Return whether the size of a value follows from the number of samples."""
    meta = graph.nodes[ref.node].outputs.get((ref.source, ref.path))
    return meta is not None and (meta.batch_dim is None or meta.batch_factor > 0)


class _SizeOnlyTensor(torch.Tensor):  # type: ignore[misc]
    """A tensor that has only size and type: computing with it raises."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: str) -> Any:
        """Create a tensor without contents; it requires a gradient, as do all values passed in this form."""
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=True)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse to compute."""
        raise SplittingError(f"{func} reads contents that are not known before the step")


class _PrecomputeRun(Execution):
    """A run of some nodes; all other nodes have only sizes."""

    of_function = False  # the current node is an opaque function

    def step(self, node: Node) -> None:
        """Run one node."""
        self.of_function = node.kind == "call"
        super().step(node)

    def read_number(self, expr: Expr) -> Any:
        """Return a number that an expression reads from a tensor."""
        if expr.op in _SIZES and expr.operands[0].node not in self.results:
            shape = self._shape(expr.operands[0])
            return torch.Size(shape).numel() if expr.op == "numel" else shape[expr.operands[1]]
        return super().read_number(expr)

    def _value(self, ref: Ref) -> Any:
        """Return the value of a reference; for a node that did not run, a tensor of its size and type."""
        if ref.node in self.results:
            return super()._value(ref)
        meta = self.graph.meta(ref)
        if self.of_function:
            return _SizeOnlyTensor(self._shape(ref), getattr(torch, meta.dtype), meta.device)
        return torch.zeros((), dtype=getattr(torch, meta.dtype), device=meta.device).expand(self._shape(ref))

    def _shape(self, ref: Ref) -> list[int]:
        meta = self.graph.meta(ref)
        shape = list(meta.shape)
        if meta.batch_dim is not None:
            shape[meta.batch_dim] = meta.batch_factor * self._samples()
        return shape

    def _samples(self) -> int:
        for index, path in self.graph.inputs.items():
            (meta,) = self.graph.nodes[index].outputs.values()
            if meta.batch_dim is not None:
                return int(follow(self.bound, path).shape[meta.batch_dim]) // meta.batch_factor
        raise LookupError("no input counts samples")


class Precomputed:
    """The values of one step that weights are computed from, each computed on first use."""

    def __init__(
        self,
        graph: Graph,
        bound: dict[str, Any],
        tape: Tape,
        model: nn.Module | None = None,
        host_results: Mapping[int, Any] | None = None,
    ) -> None:
        self.graph, self.bound, self.model = graph, bound, model or graph.bound_model()
        self.host_results = host_results  # of nodes that use Python's or NumPy's generator
        self.execution = self._begun()
        self.tape = tape

    def _begun(self) -> _PrecomputeRun:
        found = _PrecomputeRun(self.graph, self.model, self.bound)
        found.results.update(self.host_results or {})
        return found

    def run(self, node: int) -> Any:
        """Return the result of a node."""
        return self._run([node]).results[node]

    def changed_branch(self) -> str:
        """Return the branch of a rolled graph's Python that differs from the capture; '' if none does."""
        with torch.no_grad():
            broken = early_guards(self.graph).find_broken_in_microbatches(self.model, self.bound)
        return "" if broken is None else f"the model's Python takes another branch with some samples ({broken.line})"

    def value(self, key: Hashable) -> torch.Tensor:
        """Return the whole-batch contents of a value, as they are when it is made."""
        if isinstance(key, (Ref, WrittenValue)):
            ref, writes = (key, ()) if isinstance(key, Ref) else (key.value, key.writes)
            assert isinstance(ref, Ref)
            found: torch.Tensor = follow(self._run([ref.node, *writes]).results[ref.node], ref.path)
            return found
        assert isinstance(key, tuple)
        return self.tape.operands[key[1]]

    def _run(self, nodes: Sequence[int]) -> Execution:
        needed = data_closure(self.graph, nodes, sizes=True)
        # Writes belong to one value: another may have been made from the same memory before.
        writes = any(self.graph.nodes[index].mutates for index in needed)
        execution = self._begun() if writes else self.execution
        for index in needed - execution.results.keys():
            if index not in nodes and uses_host_rng(self.graph, self.graph.nodes[index]):
                raise SplittingError(
                    f"{self.graph.nodes[index].name} draws random numbers, and did not run when the call was made"
                )
        with torch.no_grad(), RegionSwitch() as regions:
            for index in sorted(needed - execution.results.keys()):
                one = self.graph.nodes[index]
                if one.region is not None and not one.is_source:
                    regions.to(one.region)
                execution.step(one)
        return execution


# ── parts for micro-batches ──────────────────────────────────────────────────────────────────────────────────────────
_MOST = 1 << 14  # entries per sample of a replaced value


def is_divisible(result: ResultMeta, samples: int) -> bool:
    """Return whether a result has equally many entries per sample, and few enough to be sent with the step."""
    if not isinstance(result.batch, int) or result.shape[result.batch] % samples:
        return False
    return 0 < prod(result.shape) // samples <= _MOST


def part_of(value: TensorValue, result: ResultMeta, samples: int) -> tuple[Kind, Weight] | None:
    """Return kind and weight of a known value divided among the micro-batches; None where that is impossible."""
    if not value.known or value.grad:
        return None
    if result.batch is None and prod(result.shape) <= _MOST:
        return Replicate(), WholeValue(value.key)
    if is_divisible(result, samples) and isinstance(result.batch, int):
        kind = Shard(result.batch, result.shape[result.batch] // samples)
        return kind, PartValue(value.key, kind)
    return None


def row_indices_of(value: TensorValue, result: ResultMeta, samples: int, rows: int) -> tuple[Kind, Weight] | None:
    """Return the same for a value that holds row indices."""
    found = part_of(value, result, samples)
    if found is None or not isinstance(found[0], Shard):
        return None
    return RowIndices(found[0], rows), OwnRows(value.key, found[0], rows)


def split_results(
    results: Sequence[tuple[Any, ResultMeta]], values: Any, samples: int, pointers: Mapping[Hashable, int]
) -> tuple[list[Kind], Weight] | None:
    """Return kinds and weight of the results of a function: several tensors of unknown kind, or row indices."""
    if len(results) == 1:
        ((key, result),) = results
        one = row_indices_of(values[key], result, samples, pointers[key]) if key in pointers else None
        return None if one is None else ([one[0]], one[1])
    places = [key.path for key, _ in results]
    if any(len(path) != 1 or path[0][0] != "i" for path in places):
        return None
    if not all(isinstance(values[key].kind, Opaque) for key, _ in results):
        return None
    found = [
        row_indices_of(values[key], result, samples, pointers[key])
        if key in pointers
        else part_of(values[key], result, samples)
        for key, result in results
    ]
    shares = tuple((path[0][1], one[1]) for path, one in zip(places, found, strict=True) if one is not None)
    kinds = [values[key].kind if one is None else one[0] for (key, _), one in zip(results, found, strict=True)]
    return (kinds, SeveralWeights(shares)) if shares else None
