"""Graph: a captured model as data, with the operations a user calls on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Mapping as MappingType
from collections.abc import Sequence as SequenceType
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, ClassVar, Protocol, TypeVar

from torch import nn

from gemini.errors import CaptureError
from gemini.ir.call_binding import bind
from gemini.ir.equivalence import layer_classes, node_classes
from gemini.ir.interpreter import Execution, last_uses
from gemini.ir.node import Guard, Node, TensorMeta
from gemini.ir.pytree import Form, Path, Ref, leaves
from gemini.ir.validity import Validity

Stages = MappingType[int, int] | SequenceType[int]  # the stage of each node
_T = TypeVar("_T")


class VariantDispatcher(Protocol):
    """The graphs of one model for its different calls (`gemini.capture.specialize`)."""

    graphs: list[Graph]
    limit: int
    captured: int  # variants captured after the first
    eager: int  # calls that ran the model itself

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call by the graph that fits it, or by the model."""


@dataclass
class Graph:
    """A model as nodes in execution order.

    `blocks` and `calls` are the opaque regions, with the reason of each; `checked` lists the batches on which the graph
    was compared with the model. `awaited_state` describes the state in which a loaded graph was captured, until its
    model is in that state.
    """

    model_name: str
    nodes: list[Node]
    guards: list[Guard]
    inputs: dict[int, Path]
    result: Form
    blocks: dict[str, str] = field(default_factory=dict)
    calls: dict[str, str] = field(default_factory=dict)
    checked: dict[str, str] = field(default_factory=dict)
    batch_size: int | None = None
    rolled: int = 0  # for a graph of a micro-batch: the number of copies in the batch that it was compared with
    whole_batch_guards: tuple[int, ...] = ()  # the guards that must hold on that whole batch, too
    pins: tuple[int, ...] = ()  # the inputs whose contents must be the captured ones
    settings: dict[str, Any] = field(default_factory=dict)
    model: nn.Module | None = None
    validity: Validity | None = None
    variants: VariantDispatcher | None = None
    awaited_state: list[str] | None = None
    reassigned: tuple[str, ...] = ()  # tensors of the model whose memory its forward replaces (`tensor.data = …`)

    # Attaches a loaded graph to its model. `gemini.capture`, which can check the state of a model, sets it.
    attach: ClassVar[Callable[[Graph, nn.Module], Graph] | None] = None

    def __post_init__(self) -> None:
        self._derived: dict[Any, Any] = {}

    # ── structure ──────────────────────────────────────────────────────────────────────────────────────────────
    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes)

    def __getitem__(self, key: int | str) -> Node:
        if isinstance(key, int):
            return self.nodes[key]
        found = [node for node in self.nodes if node.name == key]
        if not found:
            raise CaptureError(f"the graph of {self.model_name} has no node {key!r}")
        return found[0]

    @property
    def is_whole(self) -> bool:
        """Whether the model is one opaque block, which cannot be partitioned."""
        return "" in self.blocks

    @property
    def compute_nodes(self) -> list[Node]:
        """All nodes but inputs and tensors of the model."""
        return [node for node in self.nodes if not node.is_source]

    def meta(self, ref: Ref) -> TensorMeta:
        """Return the metadata of a value."""
        return self.nodes[ref.node].outputs[ref.source, ref.path]

    def edges(self) -> Iterator[tuple[int, int, Ref]]:
        """Yield (producer, consumer, value) for every tensor a node reads."""
        for node in self.nodes:
            for ref in dict.fromkeys(node.inputs()):
                yield ref.node, node.id, ref

    def outputs(self) -> list[Ref]:
        """Return the tensors of the model's output, each once; not those of which it returns only a size."""
        return list(dict.fromkeys(leaf for leaf in leaves(self.result) if isinstance(leaf, Ref)))

    def liveness(self) -> dict[int, list[int]]:
        """Return, for every node, the nodes whose results are freed after it."""
        return self.derived(last_uses)

    def guards_at(self) -> dict[int, list[Guard]]:
        """Return the guards by position."""
        return self.derived(_guards_by_position)

    def derived(self, compute: Callable[[Graph], _T]) -> _T:
        """Return `compute(graph)`, computed once per graph."""
        if compute not in self._derived:
            self._derived[compute] = compute(self)
        found: _T = self._derived[compute]
        return found

    # ── use ────────────────────────────────────────────────────────────────────────────────────────────────────
    def execute(self, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Run this graph, and no variant; raises GuardBroken where a guard does not hold."""
        model = self.bound_model()
        return Execution(self, model, bind(model, args, kwargs or {})).run()

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run in place of the model: by this graph or the variant that fits the call, captured if necessary."""
        if self.is_whole:
            return self.bound_model()(*args, **kwargs)
        if self.variants is None:
            return self.execute(args, kwargs)
        return self.variants.run(args, kwargs)

    def save(self, path: str | FilePath) -> None:
        """Write the graph as JSON (and safetensors, where it holds arrays)."""
        from gemini.ir.serialize import save_graph

        save_graph(self, path)

    @staticmethod
    def load(path: str | FilePath, model: nn.Module | None = None) -> Graph:
        """Read a graph; with the model it was captured from, it can run."""
        from gemini.ir.serialize import load_graph

        graph = load_graph(path)
        if model is None:
            return graph
        if Graph.attach is None:
            raise CaptureError("a graph cannot be attached to a model before gemini.capture is imported")
        return Graph.attach(graph, model)

    def draw(
        self,
        path: str | FilePath,
        stages: MappingType[int, int] | SequenceType[int] | None = None,
        fold: int | None = None,
    ) -> None:
        """Draw the graph, clustered by scope and coloured by stage, to an svg, pdf, png or dot file."""
        from gemini.ir.graph_picture import draw_graph

        draw_graph(self, path, stages, fold)

    def summary(self) -> str:
        """Return a text: the nodes, the opaque regions with reasons, and the checks."""
        from gemini.ir.graph_summary import summarize

        return summarize(self)

    def classes(self) -> dict[str, list[int]]:
        """Return the classes of equivalent nodes: signature → node ids."""
        return node_classes(self)

    def layers(self) -> list[list[str]]:
        """Return groups of equivalent layers, by scope."""
        return layer_classes(self)

    def bound_model(self) -> nn.Module:
        """Return the model whose weights and modules the graph uses; raises CaptureError where there is none."""
        if self.model is None:
            raise CaptureError(
                f"this graph of {self.model_name} has no model to run with\n    → Graph.load(path, model=model)"
            )
        return self.model


def _guards_by_position(graph: Graph) -> dict[int, list[Guard]]:
    found: dict[int, list[Guard]] = {}
    for guard in graph.guards:
        found.setdefault(guard.position, []).append(guard)
    return found
