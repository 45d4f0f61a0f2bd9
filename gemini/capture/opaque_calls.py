"""What runs whole: leaf modules, basic blocks, custom autograd functions, Python functions kept together.

Inside, nothing is recorded; the Python runs again in every run of the graph. Three things are watched: that no
tensor is used that was not handed in, what comes back (as result, through changed arguments, through attributes of
the module, or collected by hooks from inner modules), and what is written in place.
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
from gemini.capture.patches import ORIGINAL_APPLY, ORIGINAL_CALL, ORIGINAL_PARAMETER
from gemini.capture.provenance import module_tensors
from gemini.capture.scaling_reads import READS_SAMPLE_COUNTS
from gemini.capture.trace_state import USES_HOST_RNG, EscapedTensor, TraceRefused, TraceState
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
    """A leaf that is running: the tensors it may touch, and what its inner modules returned."""

    allowed: set[int]
    own: dict[int, str]
    uses: set[str] = field(default_factory=set)
    calls: dict[str, int] = field(default_factory=dict)
    made: list[EscapedTensor] = field(default_factory=list)
    given: tuple[Ref, ...] = ()
    counts: bool = False  # whether contents decide sizes in it
    numbers: set[int] = field(default_factory=set)  # what its Python has read of contents, and of such sizes
    written: set[int] = field(default_factory=set)  # memory, also by way of `.data`, which has versions of its own


@dataclass(frozen=True)
class OpaqueCall:
    """Something to run whole."""

    kind: str
    stem: str
    target: str
    call: Callable[[Any, Any], Any]
    module: nn.Module | None = None
    reason: str = ""


class OpaqueCallRecorder(TraceState):
    """The part of the tracer that modules and functions are routed to."""

    leaf: RunningLeaf | None = None
    busy = False
    checkpoint = ""
    saw_checkpoint = False
    failed: tuple[str, ...] = ()  # the innermost open modules when the model raised
    caches: tuple[Any, ...] = ()  # memoized functions of the model's code

    def __init__(self, model: nn.Module, leaf_policy: LeafPolicy) -> None:
        super().__init__(model, leaf_policy)
        self.attributes = AttributeTracker(model)
        self.touched: set[tuple[int, str]] = set()  # attributes that the glue has read
        self.written: set[tuple[int, str]] = set()  # attributes that it has set
        self.assigned: dict[tuple[str, str], int] = {}  # the last node that sets an attribute of a module

    def on_module(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Open the module or record it as one node."""
        name = self.origins.modules.get(id(module))
        if self.busy or not self.active or name is None:  # a module made on the fly is glue
            return ORIGINAL_CALL(module, *args, **kwargs)
        if self.leaf is not None:
            return self._inner_module(self.leaf, name, module, args, kwargs)
        kind, reason = self.leaf_policy.kind(name, module, len(self.scope), self.checkpoint)
        if kind == "open" or (module is self.model and name not in self.leaf_policy.blocks):
            return self.open(name, lambda: ORIGINAL_CALL(module, *args, **kwargs))
        job = OpaqueCall(kind, name or "model", name, lambda a, k: ORIGINAL_CALL(module, *a, **k), module, reason)
        return self.whole(job, args, kwargs)

    def open(self, name: str, call: Callable[[], Any]) -> Any:
        """Run a module whose Python is recorded."""
        self.check_host_rng()
        self.scope.append(name)
        outer, self.checkpoint = self.checkpoint, ""
        try:
            output = call()
            self.check_host_rng()
            return output
        except Exception:
            self.failed = self.failed or tuple(self.scope)
            raise
        finally:
            self.checkpoint = outer
            self.scope.pop()

    def on_set(self, module: nn.Module, name: str, value: Any) -> None:  # noqa: ARG002
        """Remember what the glue sets."""
        if self.leaf is None and not self.busy and self.active:
            self.attributes.touched.add((id(module), name))
            self.written.add((id(module), name))

    def on_get(self, module: nn.Module, name: str) -> None:
        """Remember what the glue reads, unless it has set that itself."""
        if self.leaf is None and not self.busy and self.active and (id(module), name) not in self.written:
            self.touched.add((id(module), name))

    def reads(self) -> list[tuple[str, str]]:
        """(module, attribute) of what the glue has read."""
        return [(self.origins.modules[owner], key) for owner, key in self.touched if owner in self.origins.modules]

    def on_frozen_parameter(self, data: torch.Tensor) -> torch.Tensor:
        """A parameter without a gradient that the glue makes of a tensor is that tensor, detached."""
        made: torch.Tensor = ORIGINAL_PARAMETER(nn.Parameter, data, False)
        if self.leaf is None and not self.busy and self.active:
            self.known.add(made, self.origin(data.detach()))  # which is seen as any torch function is
        return made

    def on_function(self, cls: type, args: Any, kwargs: Any) -> Any:
        """A custom autograd function is one node."""
        if self.leaf is not None or self.busy or not self.active:
            return ORIGINAL_APPLY(cls, *args, **kwargs)
        symbol = symbol_of(cls)
        if symbol is None:
            self.refuse(f"the autograd function {cls.__qualname__} cannot be imported by name")
        target, stem = f"{symbol.module}:{symbol.qualname}", f"{self.here()}{cls.__name__}"
        return self.whole(OpaqueCall("function", stem, target, lambda a, k: ORIGINAL_APPLY(cls, *a, **k)), args, kwargs)

    def on_call(self, target: str, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A Python function that refinement keeps whole is one node."""
        if self.leaf is not None or self.busy or not self.active:
            return function(*args, **kwargs)
        stem = f"{self.here()}{target.rpartition('.')[2].rpartition(':')[2]}"
        return self.whole(OpaqueCall("call", stem, target, lambda a, k: function(*a, **k)), args, kwargs)

    @contextmanager
    def on_checkpoint(self, kind: str) -> Iterator[None]:
        """What runs in here was checkpointed by the model."""
        outer, self.checkpoint, self.saw_checkpoint = self.checkpoint, kind, True
        try:
            yield
        finally:
            self.checkpoint = outer

    # ── one whole call ─────────────────────────────────────────────────────────────────────────────────────────
    def whole(self, job: OpaqueCall, args: Any, kwargs: Any) -> Any:
        """Run it, record it as one node."""
        self.busy = True
        self.check_host_rng()
        forms = self.encode(args), self.encode(kwargs)
        args, kwargs = strip(args), strip(kwargs)
        given = [tensor for _, tensor in tensors((args, kwargs))]
        versions = self.storages.versions(given)
        self.assignments(job.module, final=False)
        node = self.start(job.kind, job.stem, job.target, *forms)
        node.reason, node.cls = job.reason, type(job.module).__name__ if job.module is not None else ""
        node.checkpoint = self.checkpoint if job.module is not None else ""
        self._check_swapped(job.module)
        leaf = RunningLeaf(
            {id(tensor) for tensor in given}, module_tensors(job.module) if job.module is not None else {}
        )
        leaf.given = tuple(dict.fromkeys(self.origin(tensor) for tensor in given))
        held, random, memory = structure_of((args, kwargs)), torch_rng_fingerprint(), miss_counts(self.caches)
        state = module_states(job.module) if job.module is not None else {}
        self.leaf, self.recording, self.busy = leaf, False, False
        try:
            output = job.call(args, kwargs)
        finally:
            self.leaf, self.recording = None, True
            clear_filled(self.caches, memory)
        self.busy = True
        if job.kind == "call" and concretize.holds_number(output):
            self._release(job.target)
        if job.kind == "call" and concretize.holds_decision(output):
            self.refuse("its Python code branches on values the model computes")  # or a function further out
        node.random = random != torch_rng_fingerprint() or self.host_rng != host_rng_fingerprint()
        if self.host_rng != host_rng_fingerprint():  # for whatever reason it is kept whole
            kept = self.leaf_policy.call_reasons if job.kind == "call" else self.leaf_policy.host_rng_modules
            kept[job.target] = USES_HOST_RNG
        self.host_rng = host_rng_fingerprint()
        self.attributes.refresh(job.module)
        node.uses = tuple(sorted(leaf.uses))
        if job.module is not None:
            names = find_changed(state, job.module, leaf.written)
            node.changes = tuple(".".join(filter(None, (job.target, name))) for name in names)
        node.out_spec = structure_of(output)
        if (after := structure_of((args, kwargs))) != held:
            node.out_spec += f" | {after}"
        node.after = self._earlier(job)
        seen = [version - (storage_id(one) in leaf.written) for one, version in zip(given, versions, strict=True)]
        self.effects(node, given, seen)
        self.last_call[job.target] = node.id
        self._note_results(leaf, given, [tensor for _, tensor in tensors(output)])
        self.append(node, list(tensors(output)), from_weights=self._follows_from_weights(job, node))
        self._side_results(node, job.module, leaf, (args, kwargs))
        self._arrays(node, output)
        self.busy = False
        return output

    def _note_results(self, leaf: RunningLeaf, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        """Sizes of results that may follow from numbers which Python has read inside, or were made out of sight."""
        sized = [found for tensor in given if (found := self.sized(tensor)) is not None]
        moving = {one.shape[dim] for one in sized for dim in one.dims}
        fixed = {size for one in given for size in one.shape}
        for tensor in made if moving or leaf.numbers else ():
            before, shape = self.sized(tensor), tuple(tensor.shape)
            if tensor in self.known:
                continue
            read = leaf.numbers | (set() if tensor in self.escaped else moving)

            def depends(dim: int, size: int, before: DynamicShape | None = before, read: set[int] = read) -> bool:
                others = leaf.counts and bool(leaf.numbers) and size not in fixed
                return size in read or others or (before is not None and dim in before.dims)

            causes = dict.fromkeys(cause for one in sized for cause in one.causes)
            causes.update(dict.fromkeys((*(before.causes if before else ()), *(leaf.given if leaf.numbers else ()))))
            self.leaf_shapes.add(tensor, DynamicShape(shape, resize_cases(shape, depends), tuple(causes)))

    def _follows_from_weights(self, job: OpaqueCall, node: Node) -> bool:
        """Whether a result does, also where no argument does: its Python may then branch on it in no other way."""
        if job.module is not None:
            return any(True for _ in job.module.parameters())
        return bool(node.uses) or not self.leaf_policy.call_reasons.get(job.target, "").startswith(READS_SAMPLE_COUNTS)

    def _release(self, target: str) -> None:
        """A function that is kept whole for what it reads only, and tells its caller some of it, is followed again."""
        if self.leaf_policy.call_reasons.get(target, "").startswith(READS_SAMPLE_COUNTS):
            found = TraceRefused(tuple(self.scope), f"{target} tells what it reads", "")
            found.released = target
            raise found

    def _earlier(self, job: OpaqueCall) -> tuple[int, ...]:
        """Nodes that must come first: a module may keep state from call to call, and the glue may set some of it."""
        found = {self.last_call[job.target]} if job.target in self.last_call else set()
        if job.module is not None and self.assigned:
            inside = {self.origins.modules.get(id(part), "") for part in job.module.modules()}
            found |= {at for (name, _), at in self.assigned.items() if name in inside}
        return tuple(sorted(found))

    def assignments(self, module: nn.Module | None, final: bool) -> None:
        """Record which attributes of a module the glue has set; `final`: when the model has run."""
        for name, key, value, other in self.attributes.assigned_since(module, not final) if module is not None else ():
            if not can_assign(value, other):
                if not final:
                    self.refuse(f"its Python code sets the attribute {key!r} of {name or 'the model'}")
                continue  # whether that matters is judged when the trace is complete
            form = SequenceForm(tuple, (ModelObject(name), Literal(key), self.encode(value)))
            node = self.start("op", f"{name or 'model'}.{key}=", ASSIGN, form, EMPTY_KWARGS)
            node.out_spec, node.changes = structure_of(None), (name,)
            node.after = (self.last_call[name],) if name in self.last_call else ()
            self.append(node, [], from_weights=False)
            self.assigned[name, key] = node.id

    def _check_swapped(self, module: nn.Module | None) -> None:
        """Refuse a module whose parameters were swapped for results of other nodes (`functional_call`)."""
        for part in module.modules() if module is not None else ():
            for held in (*part._parameters.values(), *part._buffers.values()):
                if held is not None and held in self.known and self.origins.held(held) is None:
                    self.refuse("a module runs with parameters that other code put in their place")

    def _side_results(self, node: Node, module: nn.Module | None, leaf: RunningLeaf, arguments: Any) -> None:
        """Tensors that come back otherwise than in the result."""
        for made in leaf.made:
            made.node = node.id
        for path, tensor in tensors(arguments):
            if tensor not in self.known and self.origins.held(tensor) is None:
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

    def _arrays(self, node: Node, output: Any) -> None:
        """NumPy arrays in a result are values of the graph too."""
        for path, part in walk(output):
            if isinstance(part, np.ndarray):
                self.arrays[id(part)] = Ref(node.id, "ret", path)
                self.kept.append(part)

    # ── inside ─────────────────────────────────────────────────────────────────────────────────────────────────
    def _inner_module(self, leaf: RunningLeaf, name: str, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """A module inside a leaf: remember what it returns, in case a hook carries that out."""
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

    def inside(self, leaf: RunningLeaf, func: Any, args: Any, kwargs: Any) -> Any:
        """An op inside a leaf: not recorded, but it must not touch tensors that were not handed to the leaf."""
        self.busy = True
        try:
            given = [tensor for _, tensor in tensors((args, kwargs))]
            for tensor in given:
                self._check_touch(leaf, tensor)
            versions = self.storages.versions(given)
            output = func(*args, **kwargs)
            self._note_inside(leaf, op_name(func), args, kwargs, output)
            after = self.storages.versions(given)
            leaf.written |= {storage_id(one) for one, a, b in zip(given, versions, after, strict=True) if a != b}
            for _, tensor in tensors(output):
                if tensor not in self.known:
                    self.escaped.add(tensor, EscapedTensor(tuple(self.scope)))
                leaf.allowed.add(id(tensor))
            return output
        finally:
            self.busy = False

    def _note_inside(self, leaf: RunningLeaf, name: str, args: Any, kwargs: Any, output: Any) -> None:
        """Note which sizes in a leaf depend on contents, and what its Python reads of contents and such sizes."""
        short = concretize.short_name(name)
        if short in concretize.SIZES:
            found = self.sized(args[0]) if args else None
            leaf.numbers |= {found.shape[dim] for dim in found.dims} if found is not None else set()
        elif short in concretize.READS or short == "tolist":
            leaf.numbers |= {one for _, one in walk(output) if type(one) is int}
        elif name:
            leaf.counts = self.record_sizes(name, args, kwargs, output, leaf.given) or leaf.counts

    def _check_touch(self, leaf: RunningLeaf, tensor: torch.Tensor) -> None:
        key = id(tensor)
        if key in leaf.allowed or key in leaf.own:
            return
        held = self.origins.held(tensor)
        if held is not None:
            leaf.uses.add(held[1])
        elif (ref := self.known.get(tensor)) is not None:
            scope = self.nodes[ref.node].scope or ("",)
            self.refuse("a module reads a tensor that is not among its arguments", scope)
        elif (made := self.escaped.get(tensor)) is not None:
            self.refuse("a module reads a tensor made inside another module", made.scope)
