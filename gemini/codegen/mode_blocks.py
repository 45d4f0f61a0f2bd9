"""Regions: gradient, inference and autocast modes as `with` statements."""

from __future__ import annotations

from gemini.ir.autograd_modes import DEVICE_TYPES, Region
from gemini.ir.graph import Graph


def base_region(graph: Graph) -> Region | None:
    """The region that a call comes in."""
    if graph.validity is not None:
        return graph.validity.region
    return next((node.region for node in graph.nodes if node.kind == "input"), None)


def contexts(region: Region, base: Region) -> list[str]:
    """The context managers that lead from the base region to another."""
    found = []
    if region.inference != base.inference:
        found.append(f"torch.inference_mode({'' if region.inference else 'False'})")
    if region.grad != base.grad or region.inference != base.inference:
        found.append("torch.enable_grad()" if region.grad else "torch.no_grad()")
    wanted = {kind: dtype for kind, _, dtype in region.autocast}
    present = {kind: dtype for kind, _, dtype in base.autocast}
    for kind in DEVICE_TYPES:
        if wanted.get(kind) != present.get(kind):
            how = f"dtype=torch.{wanted[kind]}" if kind in wanted else "enabled=False"
            found.append(f'torch.autocast("{kind}", {how})')
    return found
