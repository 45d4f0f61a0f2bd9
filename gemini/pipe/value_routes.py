"""Value routes: from the call to the stages, from stage to stage, and into the output of the model.

    call ──ids──► stage 0 ──hidden──► stage 1 ──logits──► output
      └──────────mask──────────────────┘

Every value is a port with a unique name. A stage takes the values of its input ports in order and returns those of its
output ports; a value is dropped after its last reader. The *caller* is the side with the arguments: it supplies
the ports of the call, and assembles the output.
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
    """The ports of all stages, and the last reader of each value."""

    def __init__(self, graph: Graph, interfaces: Sequence[Interface]) -> None:
        self.graph, self.interfaces = graph, tuple(interfaces)
        found = [port for each in self.interfaces for port in (*each.inputs, *each.outputs)]
        self.ports: dict[str, Port] = {port.name: port for port in found}
        self.from_call = tuple(port for port in self.ports.values() if port.source is None)
        made = [port for port in self.ports.values() if port.source is not None]
        self.results: dict[Any, Port] = {port.value: port for port in made if port.is_result}
        self.dropped = tuple(self._find_dropped(at) for at in range(len(self.interfaces)))

    def _find_dropped(self, stage: int) -> tuple[str, ...]:
        """Return the values that have no reader after a stage."""
        return tuple(
            name
            for name, port in self.ports.items()
            if not port.is_result and max((-1 if port.source is None else port.source, *port.targets)) == stage
        )

    def run(self, stages: Sequence[nn.Module], model: nn.Module, bound: dict[str, Any]) -> Any:
        """Run the stages in sequence, in one autograd graph, and return the output of the model."""
        caller = CallerSide(self, model, bound)
        values = {port.name: caller.read_port(port) for port in self.from_call}
        for interface, stage, dropped in zip(self.interfaces, stages, self.dropped, strict=True):
            values.update(name_outputs(interface, stage(*[values[port.name] for port in interface.inputs])))
            for name in dropped:
                del values[name]
        return caller.output(lambda port: values[port.name])


def name_outputs(interface: Interface, made: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of the outputs of a stage, which returns a single value bare, else a tuple."""
    outputs = interface.outputs
    if len(outputs) == 1:
        yield outputs[0].name, made
    else:
        yield from ((port.name, value) for port, value in zip(outputs, made or (), strict=True))


class CallerSide(Execution):
    """The side of a run that has the arguments and the model, and runs no node."""

    def __init__(self, routes: ValueRoutes, model: nn.Module, bound: dict[str, Any]) -> None:
        super().__init__(routes.graph, model, bound)
        self.routes = routes
        self._arrived: Callable[[Port], Any] | None = None
        self._pass_on: Callable[[Ref, Any], Any] = lambda _, value: value

    def read_port(self, port: Port) -> Any:
        """Return the value of a port of the call."""
        return self.read(port.value if isinstance(port.value, Ref) else Number(port.value))

    def output(self, arrived: Callable[[Port], Any], pass_on: Callable[[Ref, Any], Any] | None = None) -> Any:
        """Return the output of the model, assembled from values of the stages.

        `pass_on` receives the arguments that the model returns unchanged.
        """
        self._arrived = arrived
        if pass_on is not None:
            self._pass_on = pass_on
        return decode(self.graph.result, self.read)

    def read_number(self, expr: Expr) -> Any:
        """Return a number that is read from a tensor: received as a number, or read from a local tensor."""
        port = self.routes.results.get(expr) if self._arrived is not None else None
        return super().read_number(expr) if port is None or self._arrived is None else self._arrived(port)

    def _value(self, ref: Ref) -> Any:
        port = self.routes.results.get(ref)
        if port is not None and self._arrived is not None:
            return self._arrived(port)
        node = self.graph.nodes[ref.node]
        value = follow(self._source(node), ref.path)
        return self._pass_on(ref, value) if self._arrived is not None and node.kind == "input" else value
