"""Block headers: the `for` statements of loops over equal layers, the `with` statements of autograd modes."""

from __future__ import annotations

from gemini.codegen.attribute_paths import Paths
from gemini.codegen.liveness import Liveness
from gemini.codegen.stage_statements import Loop
from gemini.codegen.statements import Statements
from gemini.codegen.value_names import identifier, module_word, singular, unique
from gemini.ir.autograd_modes import DEVICE_TYPES, Region
from gemini.ir.graph import Graph


def loop_header(loop: Loop, statements: Statements, liveness: Liveness) -> tuple[list[str], list[str], dict[str, str]]:
    """Return (lines before, header, the names of its layers in the body)."""
    before = [f"{statements.bindings.list_of(collected).name} = []" for collected in loop.collected]
    for carried in loop.carried:
        inside, start = statements.value(carried.inside), statements.value(carried.start)
        if inside != start:
            before.append(f"{inside} = {start}")
    if not loop.layers:
        return before, [repeat_header(loop)], {}
    taken = set(liveness.reserved) | set(liveness.lives)
    names = _names(loop, taken)
    return before, _header(loop, statements.paths, list(names.values()), taken), names


def repeat_header(loop: Loop) -> str:
    """Return the header of a loop whose body is equal in every iteration."""
    return f"for _ in range({len(loop.indices)}):"


def _names(loop: Loop, taken: set[str]) -> dict[str, str]:
    word = identifier(singular(module_word(loop.prefix)))
    words = [word, f"next_{word}"] if loop.width == 2 else [f"{word}_{at + 1}" for at in range(loop.width)]
    return {path: unique(name, taken) for path, name in zip(loop.layers, words if loop.width > 1 else [word])}


def _header(loop: Loop, paths: Paths, names: list[str], taken: set[str]) -> list[str]:
    """Return a header over the layers themselves, if the loop covers them all, else over their indices."""
    holding = paths.find(loop.prefix)
    container = paths.module(loop.prefix) if loop.prefix else "self"
    whole = holding is None or holding.whole
    if holding is not None and whole:
        module = holding.module.get_submodule(loop.prefix.removeprefix(holding.path).lstrip(".") or "")
        everything = list(module._modules)
        plain = paths.module(f"{loop.prefix}.{loop.indices[0]}").endswith("]")
    else:
        everything, plain = list(holding.children) if holding is not None else [], True
    if everything == [str(index) for index in loop.indices] and plain:
        return [f"for {names[0]} in {container}{'' if whole else '.values()'}:"]
    index = unique("index", taken)
    step = loop.indices[1] - loop.indices[0]
    stop = loop.indices[-1] + step
    span = f"{loop.indices[0]}, " if loop.indices[0] or step != 1 else ""
    span += f"{stop}{'' if step == 1 else f', {step}'}"
    lines = [f"for {index} in range({span}):"]
    for at, name in enumerate(names):
        number = f"{index} + {at}" if at else index
        item = f"{container}[{number}]" if whole and plain else f"{container}[str({number})]"
        lines.append(f"    {name} = " + (f"getattr({container}, str({number}))" if whole and not plain else item))
    return lines


# ── autograd modes ───────────────────────────────────────────────────────────────────────────────────────────────────
def base_region(graph: Graph) -> Region | None:
    """Return the autograd modes at the entry of a call."""
    if graph.validity is not None:
        return graph.validity.region
    return next((node.region for node in graph.nodes if node.kind == "input"), None)


def contexts(region: Region, base: Region) -> list[str]:
    """Return the context managers that switch from the base modes to different ones."""
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
