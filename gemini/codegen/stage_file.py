"""The file of a stage: header, imports, class."""

from __future__ import annotations

from gemini.capture.forms import Ref
from gemini.capture.graph import Graph
from gemini.codegen.formatting import wrapped
from gemini.codegen.imports import Imports
from gemini.codegen.interface import Interface, Port
from gemini.codegen.paths import init_lines, is_keyed
from gemini.codegen.skeleton import Skeleton
from gemini.partition.partition import Partition


def stage_source(
    graph: Graph, partition: Partition, interface: Interface, skeleton: Skeleton, imports: Imports, body: list[str]
) -> str:
    """The text of a stage file."""
    stage, count = interface.stage, partition.nstages
    spread = any(holding.extra_state for holding in skeleton.root.walk())
    extra = imports.support("Extra") if spread else ""
    base = extra if skeleton.root.extra_state else "nn.ModuleDict" if is_keyed(graph.bound_model()) else "nn.Module"
    first = "super().__init__(model)" if skeleton.root.extra_state else "super().__init__()"
    lines = [
        f'"""Stage {stage} of {count} of {graph.model_name}."""',
        "",
        "from __future__ import annotations",
        "",
        *imports.lines(),
        "",
        "",
        f"class Stage{stage}({base}):",
        f'    """Stage {stage} of {count}."""',
        "",
        "    def __init__(self, model: nn.Module) -> None:",
        *_indented([first, *init_lines(skeleton, extra)]),
        "",
        *_signature(interface),
        *_indented(body),
    ]
    return "\n".join(lines) + "\n"


def _indented(lines: list[str]) -> list[str]:
    return [physical for line in lines for physical in (wrapped(line, 8) if line.strip() else [""])]


def _signature(interface: Interface) -> list[str]:
    given = ["self", *(f"{port.name}: {_type(port)}" for port in interface.inputs)]
    return wrapped(f"def forward({', '.join(given)}) -> {_return_type(interface)}:", 4)


def _type(port: Port) -> str:
    return "Tensor" if isinstance(port.value, Ref) else "int"


def _return_type(interface: Interface) -> str:
    types = [_type(port) for port in interface.outputs]
    if len(types) == 1:
        return types[0]
    if len(types) > 4 and set(types) == {"Tensor"}:
        return "tuple[Tensor, ...]"
    return f"tuple[{', '.join(types) or '()'}]"
