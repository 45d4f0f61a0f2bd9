"""Opaque calls: leaf modules, basic blocks, custom autograd functions and Python functions recorded as one node.

Their inside is not recorded; the Python runs again in every run of the graph. The tracer checks that they use no
tensor that was not passed in, and records the tensors they return (as result, through changed arguments, through
attributes of the module, or collected by hooks from inner modules) and the tensors they write.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from gemini.capture import concretize
from gemini.capture.attribute_writes import ASSIGN, AttributeTracker, can_assign
from gemini.capture.dynamic_shapes import DynamicShape, resize_cases
from gemini.capture.leaf_policy import LeafPolicy
from gemini.capture.memoized import clear_filled, miss_counts
from gemini.capture.patches import ORIGINAL_CALL, ORIGINAL_PARAMETER, original_apply
from gemini.capture.provenance import module_tensors
from gemini.capture.scaling_reads import READS_SAMPLE_COUNTS
from gemini.capture.trace_state import BRANCHES_ON_RESULTS, USES_HOST_RNG, EscapedTensor, TraceRefused, TraceState
from gemini.ir.encode import strip, tensors, walk
from gemini.ir.import_paths import symbol_of
from gemini.ir.node import EMPTY_KWARGS, Node
from gemini.ir.op_targets import op_name
from gemini.ir.out_spec import structure_of
from gemini.ir.pytree import Literal, ModelObject, Ref, SequenceForm
from gemini.snapshot.changed_modules import find_changed, module_states
from gemini.snapshot.rng_snapshot import host_rng_fingerprint, torch_rng_fingerprint
from gemini.snapshot.tensor_writes import storage_id


@dataclass
class RunningLeaf:
    """A running leaf: the tensors it may use, and the results of its inner modules."""

    allowed: set[int]
    own: dict[int, str]
    uses: set[str] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)
    made: list[EscapedTensor] = field(default_factory=list)
    inputs: tuple[Ref, ...] = ()
    counts: bool = False  # whether contents decide sizes in it
    numbers: set[int] = field(default_factory=set)  # numbers that its Python reads from contents, and such sizes
    checkpoint: str = ""  # the kind of the checkpoints in it
    written: set[int] = field(default_factory=set)  # storages, also through `.data`, which has its own versions


@dataclass(frozen=True)
class OpaqueCall:
    """A call to run and record as one node."""

    kind: str
    stem: str
    target: str
    call: Callable[[Any, Any], Any]
    module: nn.Module | None = None
    reason: str = ""


class OpaqueCallRecorder(TraceState):
    """The part of the tracer that handles module and function calls."""

    leaf: RunningLeaf | None = None
    busy = False
    checkpoint = ""
    saw_checkpoint = False
    recomputed = range(0)  # the nodes of the last checkpoint that the open module has made
    checkpoints = 0  # whose inside is recorded, so far
    failed: tuple[str, ...] = ()  # the innermost open modules when the model raised
    caches: tuple[Any, ...] = ()  # memoized functions of the model's code

    def __init__(self, model: nn.Module, leaf_policy: LeafPolicy) -> None:
        super().__init__(model, leaf_policy)
        self.attributes = AttributeTracker(model)
        self.touched: set[tuple[int, str]] = set()  # attributes that the glue has read
        self.written: set[tuple[int, str]] = set()  # attributes that it has set
        self.checkpointing: dict[str, None] = {}  # open modules that checkpoint all of their forward
        self.assigned: dict[tuple[str, str], int] = {}  # the last node that sets an attribute of a module

    def on_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Open a module or record it as one node."""
        name = self.model_index.modules.get(id(module))
        if self.busy or not self.active or name is None:  # a module made on the fly is glue
            return ORIGINAL_CALL(module, *args, **kwargs)
        if self.leaf is not None:
            return self._run_inner_module(self.leaf, name, module, args, kwargs)
        kind, reason = self.leaf_policy.classify(name, module, len(self.scope), self.checkpoint)
        if kind == "open" or (module is self.model and name not in self.leaf_policy.blocks):
            return self.open(name, lambda: ORIGINAL_CALL(module, *args, **kwargs))
        job = OpaqueCall(kind, name or "model", name, lambda a, k: ORIGINAL_CALL(module, *a, **k), module, reason)
        return self.run_opaque(job, args, kwargs)

    def open(self, name: str, call: Callable[[], Any]) -> Any:
        """Run a module whose Python is recorded."""
        self.check_host_rng()
        self.scope.append(name)
        outer, self.checkpoint = self.checkpoint, ""
        outer_recomputed, self.recomputed, begin = self.recomputed, range(0), len(self.nodes)
        try:
            output = call()
            self.check_host_rng()
            if name and self._is_one_checkpoint(begin):
                self.checkpointing[name] = None
            return output
        except Exception:
            self.failed = self.failed or tuple(self.scope)
            raise
        finally:
            self.checkpoint, self.recomputed = outer, outer_recomputed
            self.scope.pop()

    def _is_one_checkpoint(self, begin: int) -> bool:
        """Return whether all nodes of the open module, several of them, are inside one checkpoint of the module."""
        ran = [node.id for node in self.nodes[begin:] if not node.is_source]
        return not self.leaf_policy.opens_leaves and len(ran) > 1 and all(at in self.recomputed for at in ran)

    def on_set(self, module: nn.Module, name: str, value: Any) -> None:  # noqa: ARG002
        """Record an attribute write of the glue."""
        if self.leaf is None and not self.busy and self.active:
            self.attributes.touched.add((id(module), name))
            self.written.add((id(module), name))

    def on_get(self, module: nn.Module, name: str) -> None:
        """Record an attribute read of the glue, unless the glue wrote the attribute."""
        if self.leaf is None and not self.busy and self.active and (id(module), name) not in self.written:
            self.touched.add((id(module), name))

    def reads(self) -> list[tuple[str, str]]:
        """Return (module, attribute) of all reads of the glue."""
        return [
            (self.model_index.modules[owner], key) for owner, key in self.touched if owner in self.model_index.modules
        ]

    def on_frozen_parameter(self, data: torch.Tensor) -> torch.Tensor:
        """Record a parameter without a gradient that the glue makes of a tensor as that tensor, detached."""
        made: torch.Tensor = ORIGINAL_PARAMETER(nn.Parameter, data, False)
        if self.leaf is None and not self.busy and self.active:
            self.known.add(made, self.origin(data.detach()))  # `detach` is recorded as an op
        return made

    def on_function(self, cls: type, args: Any, kwargs: Any) -> Any:
        """Record a custom autograd function as one node."""
        if self.leaf is not None or self.busy or not self.active:
            return original_apply(cls, *args, **kwargs)
        symbol = symbol_of(cls)
        if symbol is None:
            self.refuse(f"the autograd function {cls.__qualname__} cannot be imported by name")
        target, stem = f"{symbol.module}:{symbol.qualname}", f"{self.name_prefix()}{cls.__name__}"
        return self.run_opaque(
            OpaqueCall("function", stem, target, lambda a, k: original_apply(cls, *a, **k)), args, kwargs
        )

    def on_call(self, target: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record an opaque Python function as one node."""
        if self.leaf is not None or self.busy or not self.active:
            return function(*args, **kwargs)
        stem = f"{self.name_prefix()}{target.rpartition('.')[2].rpartition(':')[2]}"
        return self.run_opaque(OpaqueCall("call", stem, target, lambda a, k: function(*a, **k)), args, kwargs)

    @contextmanager
    def on_checkpoint(self, kind: str) -> Iterator[None]:
        """Mark the code in the block as checkpointed by the model."""
        outer, self.checkpoint, self.saw_checkpoint = self.checkpoint, kind, True
        begin, around = len(self.nodes), self.recomputation
        if self.leaf is not None:
            self.leaf.checkpoint = kind
        elif self.leaf_policy.opens_leaves and not self.busy:
            self.checkpoint = ""
            if not around:  # the inside of one in another is recomputed with that
                self.checkpoints = self.recomputation = self.checkpoints + 1
        try:
            yield
        finally:
            self.recomputation = around
            self.checkpoint, self.recomputed = outer, range(begin, len(self.nodes))

    # ── one opaque call ────────────────────────────────────────────────────────────────────────────────────────
    def run_opaque(self, job: OpaqueCall, args: Any, kwargs: Any) -> Any:
        """Run a call and record it as one node."""
        self.busy = True
        self.check_host_rng()
        forms = self.encode(args), self.encode(kwargs)
        args, kwargs = strip(args), strip(kwargs)
        inputs = [tensor for _, tensor in tensors((args, kwargs))]
        versions = self.storages.versions(inputs)
        self.record_attribute_writes(job.module, final=False)
        node = self.start(job.kind, job.stem, job.target, *forms)
        node.reason, node.cls = job.reason, type(job.module).__name__ if job.module is not None else ""
        node.checkpoint = self.checkpoint if job.module is not None else ""
        self._check_replaced(job.module)
        leaf = RunningLeaf(
            {id(tensor) for tensor in inputs}, module_tensors(job.module) if job.module is not None else {}
        )
        leaf.inputs = tuple(dict.fromkeys(self.origin(tensor) for tensor in inputs))
        before, random, misses = structure_of((args, kwargs)), torch_rng_fingerprint(), miss_counts(self.caches)
        state = module_states(job.module) if job.module is not None else {}
        self.leaf, self.recording, self.busy = leaf, False, False
        try:
            output = job.call(args, kwargs)
        finally:
            self.leaf, self.recording = None, True
            clear_filled(self.caches, misses)
        self.busy = True
        if job.kind == "call" and concretize.holds_number(output):
            self._trace_again(job.target)
        if job.kind == "call" and concretize.holds_decision(output):
            self.refuse(BRANCHES_ON_RESULTS)
        before_host_rng, self.host_rng = self.host_rng, host_rng_fingerprint()
        used_host_rng = before_host_rng != self.host_rng
        node.random = used_host_rng or random != torch_rng_fingerprint()
        if used_host_rng:  # whatever made it opaque
            reasons = self.leaf_policy.call_reasons if job.kind == "call" else self.leaf_policy.host_rng_modules
            reasons[job.target] = USES_HOST_RNG
        self.attributes.refresh(job.module)
        node.checkpoint = node.checkpoint or (f"own {leaf.checkpoint}" if leaf.checkpoint else "")
        node.uses = tuple(sorted(leaf.uses))
        if job.module is not None:
            names = find_changed(state, job.module, leaf.written)
            node.changes = tuple(".".join(filter(None, (job.target, name))) for name in names)
        node.out_spec = structure_of(output)
        if (after := structure_of((args, kwargs))) != before:
            node.out_spec += f" | {after}"
        node.after = self._predecessors(job)
        seen = [version - (storage_id(one) in leaf.written) for one, version in zip(inputs, versions, strict=True)]
        self.record_tensor_writes(node, inputs, seen)
        self.last_call[job.target] = node.id
        self._record_result_sizes(leaf, inputs, [tensor for _, tensor in tensors(output)])
        self.append(node, list(tensors(output)), from_weights=self._depends_on_weights(job, node))
        self._register_side_results(node, job.module, leaf, (args, kwargs))
        self._register_arrays(node, output)
        self.busy = False
        return output

    def _record_result_sizes(self, leaf: RunningLeaf, inputs: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Record result sizes that may depend on numbers which the leaf's Python read or computed."""
        sized = [found for tensor in inputs if (found := self.dynamic_shape(tensor)) is not None]
        moving = {one.shape[dim] for one in sized for dim in one.dims}
        fixed = {size for one in inputs for size in one.shape}
        for tensor in made if moving or leaf.numbers else ():
            before, shape = self.dynamic_shape(tensor), tuple(tensor.shape)
            if tensor in self.known:
                continue
            read = leaf.numbers | (set() if tensor in self.escaped else moving)

            def depends(dim: int, size: int, before: DynamicShape | None = before, read: set[int] = read) -> bool:
                counted = leaf.counts and bool(leaf.numbers) and size not in fixed
                return size in read or counted or (before is not None and dim in before.dims)

            causes = dict.fromkeys(cause for one in sized for cause in one.causes)
            causes.update(dict.fromkeys((*(before.causes if before else ()), *(leaf.inputs if leaf.numbers else ()))))
            self.leaf_shapes.add(tensor, DynamicShape(shape, resize_cases(shape, depends), tuple(causes)))

    def _depends_on_weights(self, job: OpaqueCall, node: Node) -> bool:
        """Return whether a result depends on weights, or is presumed to, though no argument does."""
        if job.module is not None:
            return any(True for _ in job.module.parameters())
        return bool(node.uses) or not self.leaf_policy.call_reasons.get(job.target, "").startswith(READS_SAMPLE_COUNTS)

    def _trace_again(self, target: str) -> None:
        """Trace a function again that is opaque for its reads only, and returns some of the numbers to its caller."""
        if self.leaf_policy.call_reasons.get(target, "").startswith(READS_SAMPLE_COUNTS):
            found = TraceRefused(tuple(self.scope), f"{target} returns the numbers it reads", "")
            found.released = target
            raise found

    def _predecessors(self, job: OpaqueCall) -> tuple[int, ...]:
        """Return the nodes that must run first: earlier calls of a stateful module, and writes of its attributes."""
        found = {self.last_call[job.target]} if job.target in self.last_call else set()
        if job.module is not None and self.assigned:
            inside = {self.model_index.modules.get(id(part), "") for part in job.module.modules()}
            found |= {at for (name, _), at in self.assigned.items() if name in inside}
        return tuple(sorted(found))

    def record_attribute_writes(self, module: nn.Module | None, final: bool) -> None:
        """Record the glue's attribute writes to a module; `final`: after the model has run."""
        for name, key, value, changed in self.attributes.writes_since(module, not final) if module is not None else ():
            if not can_assign(value, changed):
                if not final:
                    self.refuse(f"its Python code sets the attribute {key!r} of {name or 'the model'}")
                continue  # checked when the trace is complete
            form = SequenceForm(tuple, (ModelObject(name), Literal(key), self.encode(value)))
            node = self.start("op", f"{name or 'model'}.{key}=", ASSIGN, form, EMPTY_KWARGS)
            node.out_spec, node.changes = structure_of(None), (name,)
            node.after = (self.last_call[name],) if name in self.last_call else ()
            self.append(node, [], from_weights=False)
            self.assigned[name, key] = node.id

    def _check_replaced(self, module: nn.Module | None) -> None:
        """Refuse a module whose parameters were replaced by results of nodes (`functional_call`)."""
        for part in module.modules() if module is not None else ():
            for tensor in (*part._parameters.values(), *part._buffers.values()):
                if tensor is not None and tensor in self.known and self.model_index.find_tensor(tensor) is None:
                    self.refuse("a module runs with parameters that other code has replaced")

    def _register_side_results(self, node: Node, module: nn.Module | None, leaf: RunningLeaf, arguments: Any) -> None:
        """Register tensors returned through arguments and attributes."""
        for made in leaf.made:
            made.node = node.id
        for path, tensor in tensors(arguments):
            if tensor not in self.known and self.model_index.find_tensor(tensor) is None:
                self.register(node, "arg", path, tensor)
        if module is None:
            return
        for key, attribute in module_tensors(module).items():
            if attribute and key not in leaf.own:
                path = tuple(("a", part) for part in attribute.split("."))
                found: Any = module
                for _, part in path:
                    found = getattr(found, part)
                if found not in self.known:
                    self.register(node, "attr", path, found)

    def _register_arrays(self, node: Node, output: Any) -> None:
        """Register the NumPy arrays of a result as values of the graph."""
        for path, part in walk(output):
            if isinstance(part, np.ndarray):
                self.arrays[id(part)] = Ref(node.id, "ret", path)
                self.alive.append(part)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _run_inner_module(self, leaf: RunningLeaf, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run a module inside a leaf; record its result, which a hook may collect."""
        output = ORIGINAL_CALL(module, *args, **kwargs)
        self.busy = True
        count = leaf.calls[name] = leaf.calls.get(name, 0) + 1
        for path, tensor in tensors(output):
            made = self.escaped.get(tensor)
            if made is not None and not made.inner:
                made.inner = (("m", name), ("c", count - 1), *path)
                leaf.made.append(made)
        self.busy = False
        return output

    def run_inside(self, leaf: RunningLeaf, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op inside a leaf: not recorded, but it must not use tensors that were not passed to the leaf."""
        self.busy = True
        try:
            inputs = [tensor for _, tensor in tensors((args, kwargs))]
            for tensor in inputs:
                self._check_use(leaf, tensor)
            versions = self.storages.versions(inputs)
            output = func(*args, **kwargs)
            self._record_inside(leaf, op_name(func), args, kwargs, output)
            after = self.storages.versions(inputs)
            leaf.written |= {storage_id(one) for one, a, b in zip(inputs, versions, after, strict=True) if a != b}
            for _, tensor in tensors(output):
                if tensor not in self.known:
                    self.escaped.add(tensor, EscapedTensor(tuple(self.scope)))
                leaf.allowed.add(id(tensor))
            return output
        finally:
            self.busy = False

    def _record_inside(self, leaf: RunningLeaf, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Record which sizes in a leaf depend on contents, and the numbers its Python reads from contents."""
        short = concretize.short_name(name)
        if short in concretize.SIZES:
            found = self.dynamic_shape(args[0]) if args else None
            leaf.numbers |= {found.shape[dim] for dim in found.dims} if found is not None else set()
        elif short in concretize.READS or short == "tolist":
            leaf.numbers |= {one for _, one in walk(output) if type(one) is int}
        elif name:
            leaf.counts = self.record_sizes(name, args, kwargs, output, leaf.inputs) or leaf.counts

    def _check_use(self, leaf: RunningLeaf, tensor: torch.Tensor) -> None:
        key = id(tensor)
        if key in leaf.allowed or key in leaf.own:
            return
        held = self.model_index.find_tensor(tensor)
        if held is not None:
            leaf.uses.add(held[1])
        elif (ref := self.known.get(tensor)) is not None:
            scope = self.nodes[ref.node].scope or ("",)
            self.refuse("a module reads a tensor that is not among its arguments", scope)
        elif (made := self.escaped.get(tensor)) is not None:
            self.refuse("a module reads a tensor made inside another module", made.scope)
