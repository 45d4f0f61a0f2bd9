"""Loops as text: the header of a `for` over alike layers, and what is set before it."""

from __future__ import annotations

from gemini.codegen.liveness import Liveness
from gemini.codegen.naming import identifier, module_word, singular, unique
from gemini.codegen.program import Loop
from gemini.codegen.statements import Statements


def loop_header(loop: Loop, statements: Statements, liveness: Liveness) -> tuple[list[str], list[str], str]:
    """(lines before, header, the name of the layer in the body)."""
    paths, bindings = statements.paths, statements.bindings
    before = [f"{bindings.list_of(collected).name} = []" for collected in loop.collected]
    for carried in loop.carried:
        inside, start = statements.value(carried.inside), statements.value(carried.start)
        if inside != start:
            before.append(f"{inside} = {start}")
    taken = set(liveness.reserved) | set(liveness.lives())
    name = unique(identifier(singular(module_word(loop.prefix))), taken)
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
        values = "" if whole else ".values()"
        return before, [f"for {name} in {container}{values}:"], name
    index = unique("index", taken)
    step = loop.indices[1] - loop.indices[0]
    stop = loop.indices[-1] + step
    span = f"{loop.indices[0]}, " if loop.indices[0] or step != 1 else ""
    span += f"{stop}{'' if step == 1 else f', {step}'}"
    item = f"{container}[{index}]" if whole and plain else f"{container}[str({index})]"
    if whole and not plain:
        item = f"getattr({container}, str({index}))"
    return before, [f"for {index} in range({span}):", f"    {name} = {item}"], name
