"""Whole-batch tail: the end of a graph that couples samples, and the proof that everything before it may be split.

    image ─► tower ─► a ─┐
                         ├─► a @ b.T ─► loss            a, b: Shard        the rest: the tail, on the whole batch
    text ──► tower ─► b ─┘

A tail is closed: every node that needs one of its values belongs to it. The values it reads are of kinds that can be
joined: sharded, replicated, sums (a mean becomes one by its weight). A tail needs no proof: it runs on all samples, as
on one device. The loss belongs to it. The numeric check at the end compares the inputs of the tail, joined from
micro-batches, with the whole batch, and the graph, captured on a micro-batch, with the model on the whole batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from gemini.batch_analysis.batch_counts import number_at, number_kind
from gemini.batch_analysis.batch_kinds import Kind, Opaque, Partial, Replicate, Shard, WeightedPartial
from gemini.batch_analysis.graph_analysis import GraphKinds, settle_assignments, settle_guards
from gemini.batch_analysis.loss_analysis import tape_outputs
from gemini.batch_analysis.loss_tape import Meta, Tape
from gemini.batch_analysis.microbatch_join import JoinKind
from gemini.batch_analysis.numeric_check import check_splitting, is_close
from gemini.batch_analysis.op_call import SampleCount, UnknownNumber
from gemini.batch_analysis.propagate import KindInterpreter
from gemini.batch_analysis.split_result import Splitting
from gemini.ir.call_binding import ModelCall
from gemini.ir.def_use import tensor_reads
from gemini.ir.encode import tensors
from gemini.ir.graph import Graph
from gemini.ir.interpreter import GuardBroken, NodeFailed
from gemini.ir.node import Node
from gemini.ir.pytree import Ref, SequenceForm, expr_refs, refs
from gemini.snapshot.model_state import ModelSnapshot
from gemini.snapshot.rng_snapshot import preserve_rng_state


class NoTail(Exception):
    """A graph has no tail; the message is the reason."""


def release_blockers(forms: GraphKinds) -> GraphKinds:
    """Return the kinds, unblocked if a tail can contain every node that blocks splitting. Raises NoTail."""
    interpreter, graph = forms.interpreter.copy(), forms.graph
    if not forms.reason:
        return forms
    if forms.reason not in interpreter.blockers.values():
        raise NoTail(forms.reason)
    interpreter.blocked = ""
    settle_guards(interpreter, graph)
    settle_assignments(interpreter, graph)
    if interpreter.blocked:
        raise NoTail(interpreter.blocked)
    return replace(forms, interpreter=interpreter)


def find_tail(forms: GraphKinds) -> tuple[int, ...]:
    """Return the nodes of the tail; none where micro-batches determine every value. Raises NoTail."""
    graph = forms.graph
    found = {node.id for node in graph.compute_nodes if any(isinstance(k, Opaque) for k in _kinds(forms, node))}
    found |= {at for at in forms.interpreter.blockers if isinstance(at, int)}
    while True:
        _close(graph, found)
        wrong = {ref.node for ref in border(graph, found) if not _can_join(forms.kind(ref))}
        wrong |= {at for at in _written_nodes(graph, found) if not graph.nodes[at].is_source}
        if wrong <= found:
            break
        found |= wrong
    found |= _tail_only_nodes(forms, found)
    _check_writes_and_rng(graph, found)
    return tuple(sorted(found))


def border(graph: Graph, nodes: Iterable[int]) -> Iterator[Ref]:
    """Yield the values of other nodes that some nodes read, if only for their size."""
    inside = set(nodes)
    for index in sorted(inside):
        for ref in graph.nodes[index].inputs():
            if ref.node not in inside and not graph.nodes[ref.node].is_source:
                yield ref


def _kinds(forms: GraphKinds, node: Node) -> Iterator[Kind]:
    for source, path in node.outputs:
        yield forms.kind(Ref(node.id, source, path))


def _can_join(kind: Kind) -> bool:
    return isinstance(kind, (Shard, Replicate, Partial, WeightedPartial))


def _close(graph: Graph, found: set[int]) -> None:
    for node in graph.compute_nodes:
        if node.id not in found and not found.isdisjoint(node.dependencies):
            found.add(node.id)


def _tail_only_nodes(forms: GraphKinds, found: set[int]) -> set[int]:
    """Return nodes that make replicated values which only the tail reads."""
    graph = forms.graph
    readers: dict[int, set[int]] = {}
    for node in graph.compute_nodes:
        for index in node.dependencies:
            readers.setdefault(index, set()).add(node.id)
    read = {ref.node for ref in refs(graph.result)}
    read |= {ref.node for guard in graph.guards for ref in expr_refs(guard.expr)}
    more: set[int] = set()
    for node in reversed(graph.compute_nodes):
        plain = node.kind == "op" and not node.random and not node.mutates and not node.after
        mine = readers.get(node.id, set())
        if (
            plain
            and node.id not in found
            and node.id not in read
            and mine
            and mine <= found | more
            and node.outputs
            and all(isinstance(kind, Replicate) for kind in _kinds(forms, node))
        ):
            more.add(node.id)
    return more


def _written_nodes(graph: Graph, found: set[int]) -> Iterator[int]:
    """Yield the nodes that made the values which a tail writes."""
    for index in found:
        for ref in graph.nodes[index].mutates:
            yield from (ref.node, *graph.nodes[ref.node].shares)


def _check_writes_and_rng(graph: Graph, found: set[int]) -> None:
    """Require that a tail writes only its own values or buffers, and that its random ops are the last of the step."""
    strange = next(
        (at for at in _written_nodes(graph, found) if at not in found and graph.nodes[at].kind != "buffer"), None
    )
    if strange is not None:
        raise NoTail(f"{graph.nodes[strange].name} is written after samples were coupled")
    model = graph.bound_model()
    for index in found:
        for owner in graph.nodes[index].changes:
            if not type(model.get_submodule(owner)).__module__.startswith("torch.nn."):
                raise NoTail(f"{graph.nodes[index].name} changes state in every run ({owner})")
    drawn = [node.id for node in graph.compute_nodes if node.random and node.id not in found]
    early = [index for index in found if graph.nodes[index].random and drawn and index < max(drawn)]
    if early:
        raise NoTail(f"{graph.nodes[early[0]].name} draws random numbers before the micro-batches")


# ── the proof ──────────────────────────────────────────────────────────────────────────────────────────────────────
def join_weighted(forms: GraphKinds, wanted: Iterable[Ref]) -> KindInterpreter:
    """Return the kinds of all values when the wanted ones are joined: means have become sums. Raises NoTail."""
    interpreter = forms.interpreter.copy()
    for ref in dict.fromkeys(wanted):
        value = interpreter.values.get(ref)
        if value is not None and isinstance(value.kind, WeightedPartial) and not interpreter.demand(ref, "share"):
            raise NoTail(f"{forms.graph.nodes[ref.node].name} is a mean that is needed both weighted and unweighted")
    for ref in wanted:
        value = interpreter.values.get(ref)
        if value is None or not isinstance(value.kind, (Shard, Replicate, Partial)):
            why = (
                value.kind.reason
                if value is not None and isinstance(value.kind, Opaque)
                else "its kind cannot be joined"
            )
            raise NoTail(f"{forms.graph.nodes[ref.node].name} cannot be joined: {why}")
    return interpreter


def join_kind_of_number(expr: object, interpreter: KindInterpreter) -> JoinKind | None:
    """Return how a number of the whole batch follows from those of micro-batches; None if it does not."""
    found = number_kind(expr, interpreter.values)
    return None if isinstance(found, UnknownNumber) else Partial() if isinstance(found, SampleCount) else Replicate()


def prove_tail(forms: GraphKinds, nodes: tuple[int, ...], tape: Tape, root: int | None, samples: int) -> Splitting:
    """Return how a step splits up to a tail of these nodes and the tape; without a root all outputs are wanted."""
    outputs = tape_outputs(forms, tape)
    if forms.reason or outputs is None:
        return Splitting(forms.reason or "the model and its graph returned different tensors")
    tail = set(nodes)
    read = set(range(tape.outputs))
    if root is not None:
        read = {root, *(number for at in tape.ops_needed_for(root) for number in tape.ops[at].reads())}
    wanted = [*border(forms.graph, tail), *(outputs[at] for at in sorted(read) if at < tape.outputs)]
    try:
        interpreter = join_weighted(forms, [ref for ref in wanted if ref.node not in tail])
    except NoTail as error:
        return Splitting(str(error))
    if tail.issuperset(interpreter.blockers):  # demands may have analysed them again
        interpreter.blocked = ""
    settle_guards(interpreter, forms.graph)
    reason = interpreter.blocked or _find_size_branch(interpreter, forms.graph, tail, samples)
    kinds = [Replicate() if ref.node in tail else interpreter.values[ref].kind for ref in outputs]
    shares = {at: one for at, one in interpreter.shares.items() if isinstance(at, int) and at not in tail}
    conditions = tuple(dict.fromkeys(one for each in interpreter.conditions.values() for one in each))
    whole = (Replicate(),) * (len(tape.metas) - tape.outputs)
    return Splitting(
        reason, forms.inputs(), dict.fromkeys(tape.operands), (*kinds, *whole), shares, conditions=conditions
    )


def _find_size_branch(interpreter: KindInterpreter, graph: Graph, tail: set[int], samples: int) -> str:
    """Return the first branch on sizes outside the tail whose outcome differs for the whole batch; '' if none."""
    for guard in graph.guards:
        if guard.data or any(ref.node in tail for part in tensor_reads(guard.expr) for ref in expr_refs(part)):
            continue
        found = number_at(guard.expr, interpreter.values, samples)
        unclear = found is None and isinstance(number_kind(guard.expr, interpreter.values), UnknownNumber)
        if unclear or (found is not None and found != guard.expected):
            return f"a branch depends on the number of samples ({guard.line})"
    return ""


# ── the numeric check ────────────────────────────────────────────────────────────────────────────────────────────────
_CLOSE = 2e-3  # in the model's precision


def check_tail(
    forms: GraphKinds, nodes: tuple[int, ...], splitting: Splitting, call: ModelCall, given: Mapping[int, Any] | None
) -> str:
    """Return why a splitting must be refused after all; '' if no comparison fails."""
    graph, (args, kwargs) = forms.graph, call.arguments()
    inside = set(nodes)
    read = list(dict.fromkeys([*border(graph, inside), *(ref for ref in graph.outputs() if ref.node not in inside)]))
    values = join_weighted(forms, border(graph, inside)).values
    read = [ref for ref in read if not graph.nodes[ref.node].is_source and ref in values]
    seen = replace(graph, result=SequenceForm(tuple, tuple(read)))
    metas = [Meta((), torch.float32, torch.device("cpu"), False)] * len(read)
    kinds = tuple(values[ref].kind for ref in read)
    found = check_splitting(
        replace(forms, graph=seen), Tape(len(read), metas), 0, replace(splitting, outputs=kinds), args, kwargs, given,
        inside,
    )  # fmt: skip
    return found or ("" if given else _compare_with_model(forms, call))


def _compare_with_model(forms: GraphKinds, call: ModelCall) -> str:
    """Return how the graph differs from the model on all samples; '' if it does not."""
    model, outputs = forms.graph.bound_model(), []
    saved = ModelSnapshot(model)
    args, kwargs = call.arguments()
    try:
        for is_model in (True, False):
            with preserve_rng_state(), torch.no_grad():
                torch.manual_seed(0)
                made = model(*args, **kwargs) if is_model else forms.graph.execute(args, kwargs)
            outputs.append([tensor for _, tensor in tensors(made)])
            saved.restore()
    except (GuardBroken, NodeFailed, RuntimeError, ValueError, IndexError, TypeError) as error:
        return f"the whole batch fails: {type(error).__name__}: {error!s:.120}"
    finally:
        saved.restore()
    own, found = outputs  # the graph may also return attributes of the model
    if len(own) <= len(found) and all(is_close(a, b, _CLOSE) for a, b in zip(own, found, strict=False)):
        return ""
    return "its graph and the model differ on the whole batch"
