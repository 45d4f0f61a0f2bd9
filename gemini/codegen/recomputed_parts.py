"""Recomputed parts: statements inside one activation checkpoint of the model, as a function that backward runs again.

    def recomputed(layer, x, mask):
        h = layer.attention(x, mask)
        return x + layer.mlp(h)
    x = checkpoint(recomputed, layer, x, mask, use_reentrant=False)

Everything that it reads is an argument: a name of `forward` may have other contents when backward begins. A part is
written plainly where it must not run twice: it writes to values from before it, or weighs a micro-batch.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from gemini.codegen.liveness import STRIDE, Liveness
from gemini.codegen.stage_statements import Loop, StageStatement, Variable
from gemini.ir.graph import Graph
from gemini.ir.node import Node

_REPEATED_WRITES = ("buffer", "attribute")  # the model's own checkpoint writes them again, too


def group_by_checkpoint(placed: Sequence[tuple[Any, int]]) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
    """Group neighbouring items by the checkpoint that they ran in; 0 for those in none."""
    numbers = [_number(item) for item, _ in placed]
    following = 0
    for at in reversed(range(len(numbers))):  # guards are in the checkpoint that encloses them
        if numbers[at] < 0:
            before = next((one for one in reversed(numbers[:at]) if one >= 0), 0)
            numbers[at] = following if before == following else 0
        following = numbers[at]
    pairs = zip(numbers, placed, strict=True)
    for number, group in groupby(pairs, key=lambda pair: pair[0]):
        yield number, [one for _, one in group]


def _number(item: Any) -> int:
    """Return the checkpoint of an item; -1 for a guard."""
    if isinstance(item, Loop):
        return 0
    found = [step.node.recomputed for step in item.steps if step.node is not None]
    return found[-1] if found else -1


def may_run_twice(graph: Graph, nodes: Iterable[Node], weighted: Collection[int]) -> bool:
    """Return whether nodes may run again in backward."""
    own = {node.id: node for node in nodes}
    if any(at in weighted for at in own):
        return False
    owners = {at for node in own.values() for ref in node.mutates for at in (ref.node, *graph.nodes[ref.node].shares)}
    return all(at in own or graph.nodes[at].kind in _REPEATED_WRITES for at in owners)


class PartInterface:
    """The names that a part reads from before it, and those that later statements read."""

    def __init__(self, statements: Sequence[StageStatement], liveness: Liveness, kept: Iterable[Variable]) -> None:
        self.start, self.end = statements[0].position, statements[-1].position + STRIDE - 1
        read, bindings = dict[Variable, None](), liveness.bindings
        for step in (step for statement in statements for step in statement.steps):
            read.update(dict.fromkeys(bindings.variables_read(step)))
        self.inputs = list(dict.fromkeys(one.name for one in read if self._is_older(one.root)))
        roots = dict.fromkeys([one for one in liveness.variables if one.merged is None])
        outputs = [one.name for one in roots if self._is_needed(one)]
        self.outputs = list(dict.fromkeys([*outputs, *(one.name for one in kept)]))
        numbers = liveness.numbers()
        self.dead = [
            one.name for one in dict.fromkeys(one.root for one in read)
            if self._is_older(one) and self._dies(one) and one.name not in (*self.outputs, *numbers)
        ]  # fmt: skip

    def _is_older(self, variable: Variable) -> bool:
        """Return whether a variable that is read here was set before."""
        return any(begin < self.start <= end for begin, end in variable.spans)

    def _is_needed(self, variable: Variable) -> bool:
        return any(self.start <= begin <= self.end < end for begin, end in variable.spans)

    def _dies(self, variable: Variable) -> bool:
        return any(begin < self.start <= end <= self.end for begin, end in variable.spans)


def part_lines(  # noqa: PLR0917
    interface: PartInterface, body: list[str], space: str, names: Collection[str], name: str, checkpoint: str,
    is_random: bool,
) -> list[str]:  # fmt: skip
    """Return the text of a part; `names` are those of modules that `forward` has in variables."""
    while body and not body[-1]:
        body.pop()
    while body and not body[0]:
        body.pop(0)
    tree = ast.parse(textwrap.dedent("\n".join(body)))
    loaded = {one.id for one in ast.walk(tree) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
    inputs = [*sorted(loaded & set(names)), *interface.inputs]
    outputs = ", ".join(interface.outputs)
    given = ", ".join([name, *inputs, "use_reentrant=False", *([] if is_random else ["preserve_rng_state=False"])])
    return [
        f"{space}def {name}({', '.join(inputs)}):",
        *(f"    {line}" if line else "" for line in body),
        f"{space}    return {outputs or 'None'}",
        "",
        f"{space}{f'{outputs} = ' if outputs else ''}{checkpoint}({given})",
    ]
