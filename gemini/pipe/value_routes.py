"""Wiring: how values get from the call to the stages, from stage to stage, and into the model's output.

    call ──ids──► stage 0 ──hidden──► stage 1 ──logits──► output
      └──────────mask──────────────────┘

Every value is a port with a name of its own. A stage takes the values of its input ports in order and returns those of
its output ports; what nobody needs any more is dropped. The *caller* is the side that has the arguments: it reads
the ports that come with the call, and puts the output together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from gemini.ir.encode import decode, follow
from gemini.ir.interpreter import Execution
from gemini.ir.pytree import Number, Ref
from gemini.ir.symint import Expr

if TYPE_CHECKING:
    from gemini.codegen.stage_interface import Interface, Port
    from gemini.ir.graph import Graph


class ValueRoutes:
    """The ports of all stages, and when each value is needed for the last time."""

    def __init__(self, graph: Graph, interfaces: Sequence[Interface]) -> None:
        self.graph, self.interfaces = graph, tuple(interfaces)
        found = [port for each in self.interfaces for port in (*each.inputs, *each.outputs)]
        self.ports: dict[str, Port] = {port.name: port for port in found}
        self.from_call = tuple(port for port in self.ports.values() if port.source is None)
        made = [port for port in self.ports.values() if port.source is not None]
        self.results: dict[Any, Port] = {port.value: port for port in made if port.is_result}
        self.dropped = tuple(self._dropped(at) for at in range(len(self.interfaces)))

    def _dropped(self, stage: int) -> tuple[str, ...]:
        """The values that nobody needs after a stage."""
        return tuple(
            name
            for name, port in self.ports.items()
            if not port.is_result and max((-1 if port.source is None else port.source, *port.targets)) == stage
        )

    def run(self, stages: Sequence[nn.Module], model: nn.Module, bound: dict[str, Any]) -> Any:
        """Run the stages one after another, one autograd graph, and return the model's output."""
        caller = CallerSide(self, model, bound)
        values = {port.name: caller.read_port(port) for port in self.from_call}
        for interface, stage, dropped in zip(self.interfaces, stages, self.dropped, strict=True):
            values.update(name_outputs(interface, stage(*[values[port.name] for port in interface.inputs])))
            for name in dropped:
                del values[name]
        return caller.output(lambda port: values[port.name])


def name_outputs(interface: Interface, made: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a stage returned: the bare value if there is one, else a tuple."""
    outputs = interface.outputs
    if len(outputs) == 1:
        yield outputs[0].name, made
    else:
        yield from ((port.name, value) for port, value in zip(outputs, made or (), strict=True))


class CallerSide(Execution):
    """The caller's side of one run: it has the arguments and the model, and no node to run."""

    def __init__(self, wiring: ValueRoutes, model: nn.Module, bound: dict[str, Any]) -> None:
        super().__init__(wiring.graph, model, bound)
        self.wiring = wiring
        self._arrived: Callable[[Port], Any] | None = None
        self._pass_on: Callable[[Ref, Any], Any] = lambda _, value: value

    def read_port(self, port: Port) -> Any:
        """The value of a port that comes with the call."""
        return self.read(port.value if isinstance(port.value, Ref) else Number(port.value))

    def output(self, arrived: Callable[[Port], Any], pass_on: Callable[[Ref, Any], Any] | None = None) -> Any:
        """The model's output, of the values that arrived from the stages.

        `pass_on` gets what the model returns of its own arguments, as they are.
        """
        self._arrived = arrived
        if pass_on is not None:
            self._pass_on = pass_on
        return decode(self.graph.result, self.read)

    def read_number(self, expr: Expr) -> Any:
        """What an expression reads from a tensor: it arrived as a number, or the tensor is here."""
        port = self.wiring.results.get(expr) if self._arrived is not None else None
        return super().read_number(expr) if port is None or self._arrived is None else self._arrived(port)

    def _value(self, ref: Ref) -> Any:
        port = self.wiring.results.get(ref)
        if port is not None and self._arrived is not None:
            return self._arrived(port)
        node = self.graph.nodes[ref.node]
        value = follow(self._source(node), ref.path)
        return self._pass_on(ref, value) if self._arrived is not None and node.kind == "input" else value
