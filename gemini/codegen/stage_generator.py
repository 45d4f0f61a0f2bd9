"""Stage generator: from a partitioned graph to the source of every stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemini.codegen.attribute_paths import Paths
from gemini.codegen.forward_body import ForwardBody
from gemini.codegen.import_block import Imports
from gemini.codegen.inline import Folding, count_uses
from gemini.codegen.liveness import Liveness
from gemini.codegen.roll_loops import Rolled, roll
from gemini.codegen.stage_file import StageFile
from gemini.codegen.stage_interface import Interface, interfaces_of
from gemini.codegen.stage_modules import Skeleton, skeletons
from gemini.codegen.stage_reads import stage_reads
from gemini.codegen.stage_statements import Item, Loop, StageStatement
from gemini.codegen.stage_steps import StageStep, stage_steps
from gemini.codegen.statements import Statements
from gemini.codegen.value_names import RESERVED, Namer
from gemini.codegen.variables import Bindings
from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.partition.assignment import Partition


@dataclass(frozen=True)
class StageCode:
    """One generated stage."""

    interface: Interface
    class_name: str  # "Stage0"
    source: str  # the text of stage_0.py
    parameters: tuple[str, ...]  # original names of the parameters this stage holds, aliases of tied ones included
    buffers: tuple[str, ...]
    is_edited: bool = False  # by hand, since it was generated


def generate_stages(
    graph: Graph, partition: Partition, shares: Mapping[int, int] | None = None
) -> tuple[StageCode, ...]:
    """Return the stages of a partitioned graph as Python sources.

    `shares`: nodes whose result is weighted per micro-batch, and the index of each in `stage.shares`.
    """
    partition.validate(graph)
    reads, namer = stage_reads(graph, partition), Namer(graph)
    made = interfaces_of(graph, partition, reads, namer)
    held = skeletons(graph, reads)
    codes = []
    for interface, skeleton in zip(made, held, strict=True):
        steps = stage_steps(graph, reads, interface)
        flagged = {step.node.id for step in steps if step.node is not None} & set(shares or ())
        own = dict(shares or {}) if flagged else {}
        codes.append(_Stage(graph, namer, interface, skeleton, own).code(steps, partition))
    return tuple(codes)


class _Stage:
    """Builds one stage."""

    def __init__(
        self, graph: Graph, namer: Namer, interface: Interface, skeleton: Skeleton, shares: Mapping[int, int]
    ) -> None:
        self.graph, self.namer, self.interface, self.skeleton = graph, namer, interface, skeleton
        self.shares = shares
        self.imports = Imports(port.name for port in interface.inputs)

    def code(self, steps: list[StageStep], partition: Partition) -> StageCode:
        """Build the stage: steps → loops → inlined statements → text. A first pass finds imports and text lengths."""
        rolled = roll(self.graph, steps, self.interface, Paths(self.skeleton), self.shares)
        _, lengths = self._lines(_one_statement_per_step(rolled), rolled)
        body, _ = self._lines(self._fold(rolled, lengths), rolled)
        interface, skeleton = self.interface, self.skeleton
        count = max(self.shares.values(), default=-1) + 1
        source = StageFile(self.graph, partition, interface, skeleton, self.imports, count).source(body)
        names = skeleton.parameter_names(), skeleton.buffer_names()
        return StageCode(interface, f"Stage{interface.stage}", source, *names)

    def _fold(self, rolled: Rolled, lengths: dict[int, int]) -> list[Item]:
        everything = [step for item in rolled.items for step in (item.steps if isinstance(item, Loop) else [item])]
        loops = [item for item in rolled.items if isinstance(item, Loop)]
        kept = [rolled.outside(port.value) for port in self.interface.outputs if isinstance(port.value, Ref)]
        kept += [ref for loop in loops for one in loop.carried for ref in (one.start, one.made)]
        kept += [one.made for loop in loops for one in loop.collected]
        folding = Folding(self.namer, count_uses(everything), kept, lengths)
        items: list[Item] = []
        run: list[StageStep] = []
        for item in rolled.items:
            if isinstance(item, StageStep):
                run.append(item)
                continue
            items += folding.fold(run)
            run = []
            item.body = folding.fold(item.steps, indent=4)
            items.append(item)
        return [*items, *folding.fold(run)]

    def _lines(self, items: list[Item], rolled: Rolled) -> tuple[list[str], dict[int, int]]:
        outputs = [rolled.outside(port.value) for port in self.interface.outputs]
        bindings = Bindings(self.graph, self.namer, self.interface.inputs, outputs, items)
        reserved = {*RESERVED, *self.imports.names.values(), *self.imports.modules}
        liveness = Liveness(items, bindings, reserved)
        statements = Statements(self.graph, bindings, self.imports, Paths(self.skeleton), self.shares)
        statements.write.taken = {*reserved, *liveness.lives}
        lines = ForwardBody(self.graph, statements, liveness).write(items)
        results = statements.results(outputs)
        return _with_return(lines, results), statements.lengths


def _one_statement_per_step(rolled: Rolled) -> list[Item]:
    """Return every step as a statement of its own."""
    items: list[Item] = []
    for item in rolled.items:
        if isinstance(item, Loop):
            item.body = [StageStatement((step,)) for step in item.steps]
        items.append(item if isinstance(item, Loop) else StageStatement((item,)))
    return items


def _with_return(lines: list[str], results: list[str]) -> list[str]:
    """Return the lines with the return statement; a value that is set last is returned directly."""
    while lines and not lines[-1]:
        lines.pop()
    if len(results) == 1 and lines and lines[-1].startswith(f"{results[0]} = "):
        return [*lines[:-1], f"return {lines[-1].partition(' = ')[2]}"]
    if len(results) == 1 and results[0].startswith("*"):  # all iterations of a loop
        return [*lines, f"return tuple({results[0][1:]})"]
    return [*lines, f"return {', '.join(results) or '()'}"]
