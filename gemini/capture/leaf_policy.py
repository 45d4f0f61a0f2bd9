"""Granularity: which modules are opened, which are leaves, which are basic blocks.

By default everything is opened down to modules without children and to the layers of torch.nn. `depth` and
`basic_blocks` keep more together; refinement adds the regions that cannot be followed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemini.errors import CaptureError, Fault
from gemini.ir.hook_tables import has_hooks
from gemini.nearest_name import remedy

# Containers of torch.nn whose Python is worth opening; its other modules are layers.
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
    """The rules in force; `blocks` and `calls` grow during refinement, with the reason of each."""

    depth: int | None = None
    classes: tuple[type, ...] = ()
    names: frozenset[str] = frozenset()
    blocks: dict[str, str] = field(default_factory=dict)
    call_reasons: dict[str, str] = field(default_factory=dict)
    host_rng_modules: dict[str, str] = field(
        default_factory=dict
    )  # modules in whose Python NumPy's generator is drawn from
    opens_leaves: bool = False  # modules without children are opened, but for those of torch.nn
    released: set[str] = field(default_factory=set)  # functions that were kept whole, and are better followed

    @property
    def calls(self) -> tuple[str, ...]:
        """Python functions to keep whole."""
        return tuple(self.call_reasons)

    def coarsen(self, scope: tuple[str, ...], reason: str, calls: tuple[str, ...] = ()) -> None:
        """Keep whole the smallest region around a failure that is not whole yet."""
        for call in calls:
            if call not in self.call_reasons:
                self.call_reasons[call] = reason
                return
        for name in (*reversed(scope), ""):
            if name not in self.blocks:
                self.blocks[name] = reason
                return
        raise CaptureError(f"the model kept whole still fails: {reason}")

    def release(self, call: str) -> None:
        """Follow a function again that was kept whole."""
        del self.call_reasons[call]
        self.released.add(call)

    def kind(self, name: str, module: nn.Module, depth: int, checkpoint: str) -> tuple[str, str]:
        """(open, module or block; why a block)."""
        if name in self.blocks:
            return "block", self.blocks[name]
        if isinstance(module, self.classes) or type(module).__name__ in self.names or name in self.names:
            return "block", "asked for"
        is_layer = type(module).__module__.startswith(("torch.nn.", "torch.ao.")) and not isinstance(module, _OPEN)
        if not any(True for _ in module.children()) and (is_layer or not self.opens_leaves):
            return "module", ""
        if self.depth is not None and depth >= self.depth:
            return "block", f"depth {self.depth}"
        if checkpoint:
            return "block", "checkpointed"
        if isinstance(module, torch.jit.ScriptModule) or type(module).__module__.startswith("torch._dynamo"):
            return "block", "compiled"
        if has_hooks(module):
            return "block", "has hooks"
        return ("module", "") if is_layer else ("open", "")


def make_leaf_policy(model: nn.Module, depth: Any, basic_blocks: Any) -> LeafPolicy:
    """Check what the caller asked for against the model; all faults at once."""
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
