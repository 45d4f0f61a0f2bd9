"""Leaf policy: which modules are opened, which are leaves, which are basic blocks.

By default every module is opened, except those without children and the layers of torch.nn. `depth` and
`basic_blocks` make more modules opaque; the capture driver adds the regions that cannot be traced.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini.errors import CaptureError, Fault
from gemini.ir.hook_tables import computes_weight, has_hooks
from gemini.nearest_name import remedy

# Modules of torch.nn that are opened; its other modules are layers.
_OPEN = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


@dataclass
class LeafPolicy:
    """The rules of one capture; `blocks` and `calls` grow during capture, with the reason of each."""

    depth: int | None = None
    classes: tuple[type, ...] = ()
    names: frozenset[str] = frozenset()
    blocks: dict[str, str] = field(default_factory=dict)
    call_reasons: dict[str, str] = field(default_factory=dict)
    host_rng_modules: dict[str, str] = field(
        default_factory=dict
    )  # modules whose Python uses Python's or NumPy's generator
    opens_leaves: bool = False  # open checkpoints, and modules without children, except simple layers of torch.nn
    released: set[str] = field(default_factory=set)  # functions that were opaque and are traced again

    @property
    def calls(self) -> tuple[str, ...]:
        """Opaque Python functions."""
        return tuple(self.call_reasons)

    def coarsen(self, scope: tuple[str, ...], reason: str, calls: tuple[str, ...] = ()) -> None:
        """Make the smallest region around a failure opaque that is not opaque yet."""
        for call in calls:
            if call not in self.call_reasons:
                self.call_reasons[call] = reason
                return
        for name in (*reversed(scope), ""):
            if name not in self.blocks:
                self.blocks[name] = reason
                return
        raise CaptureError(f"the model fails even as one opaque block: {reason}")

    def release(self, call: str) -> None:
        """Trace an opaque function again."""
        del self.call_reasons[call]
        self.released.add(call)

    def classify(self, name: str, module: nn.Module, depth: int, checkpoint: str) -> tuple[str, str]:
        """Return the kind of a module (open, module or block) and, for a block, the reason."""
        if name in self.blocks:
            return "block", self.blocks[name]
        if isinstance(module, self.classes) or type(module).__name__ in self.names or name in self.names:
            return "block", "requested"
        is_open = isinstance(module, _OPEN) or computes_weight(module) or (self.opens_leaves and _is_composed(module))
        is_layer = type(module).__module__.startswith(("torch.nn.", "torch.ao.")) and not is_open
        if not any(True for _ in module.children()) and (is_layer or not (is_open or self.opens_leaves)):
            return "module", ""
        if self.depth is not None and depth >= self.depth:
            return "block", f"depth {self.depth}"
        if checkpoint:  # none where the insides of checkpoints are recorded
            return "block", "checkpointed"
        if isinstance(module, torch.jit.ScriptModule) or type(module).__module__.startswith("torch._dynamo"):
            return "block", "compiled"
        if has_hooks(module):
            return "block", "has hooks"
        return ("module", "") if is_layer else ("open", "")


def _is_composed(module: nn.Module) -> bool:
    """Return whether a layer of torch.nn calls a function on parameters that are divided in its own way."""
    if type(module) is nn.MultiheadAttention or type(module).__name__ == "_WeightNorm":
        return True
    made = getattr(module, "parametrizations", None)  # weights computed from others, by weight_norm
    lists = made.values() if isinstance(made, nn.ModuleDict) else ()
    return bool(lists) and all(type(one).__name__ == "_WeightNorm" for parts in lists for one in parts)


def make_leaf_policy(model: nn.Module, depth: Any, basic_blocks: Any) -> LeafPolicy:
    """Build the policy that the caller requests; raises CaptureError with all faults."""
    faults: list[Fault] = []
    if depth is not None and (not isinstance(depth, int) or isinstance(depth, bool) or depth < 1):
        faults.append(Fault(f"depth={depth!r} is not a positive integer", "give 1 or more, or None for no limit"))
    if isinstance(basic_blocks, (str, type)):
        basic_blocks = (basic_blocks,)
    modules = dict(model.named_modules())
    present = {type(module).__name__: type(module) for module in modules.values()}
    classes, names = [], set()
    for wanted in basic_blocks:
        if isinstance(wanted, type):
            if any(isinstance(module, wanted) for module in modules.values()):
                classes.append(wanted)
                continue
            wanted = wanted.__name__
        elif wanted in present or wanted in modules:
            names.add(str(wanted))
            continue
        faults.append(
            Fault(
                f"basic block {wanted!r} does not occur in {type(model).__name__}", remedy(str(wanted), sorted(present))
            )
        )
    if faults:
        raise CaptureError("cannot capture:\n" + "\n".join(f"  - {fault}" for fault in faults))
    return LeafPolicy(depth, tuple(classes), frozenset(names))
