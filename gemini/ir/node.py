"""Nodes and guards: the parts a graph is made of. Plain data; the executor gives them meaning.

| kind                            | target                | is                                                      |
|---------------------------------|-----------------------|---------------------------------------------------------|
| input                           | path in the call      | a tensor the caller passes                              |
| parameter, buffer, attribute    | name in the model     | a tensor the model holds                                |
| op                              | `torch.Tensor.add`    | one torch function                                      |
| function                        | `package.mod:Class`   | a custom autograd function                              |
| call                            | `package.mod:name`    | a Python function of the model's glue, kept whole       |
| module                          | `encoder.layer.0.fc`  | a leaf module                                           |
| block                           | `encoder.layer.0`     | a basic block: a module kept whole, its Python runs     |
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gemini.ir.autograd_modes import Region
from gemini.ir.pytree import Form, Mapping, Path, Ref, Sequence, refs
from gemini.ir.symint import Expr

SOURCES = ("input", "parameter", "buffer", "attribute")
MODULES = ("module", "block")
EMPTY_ARGS = Sequence(tuple, ())
EMPTY_KWARGS = Mapping(dict, ())


@dataclass(frozen=True)
class TensorMeta:
    """What is known about a tensor value: its size on the captured batch and which dimension holds the batch."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    batch_dim: int | None = None
    batch_factor: int = 1  # elements of the batch dimension a sample: > 1 where the batch is flattened with another
    strides: tuple[int, ...] | None = None  # where the elements lie, unless one after the other

    @property
    def numel(self) -> int:
        """The number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass
class Node:
    """One step of a captured model."""

    id: int
    kind: str
    name: str
    target: str
    args: Form = EMPTY_ARGS
    kwargs: Form = EMPTY_KWARGS
    region: Region | None = None
    scope: tuple[str, ...] = ()  # the open modules it ran in, outermost first
    line: str = ""
    cls: str = ""  # the class of a module node
    sketch: str = "T"  # the structure of the result; another one in a later run breaks the graph
    outputs: dict[tuple[str, Path], TensorMeta] = field(default_factory=dict)
    mutates: tuple[Ref, ...] = ()
    after: tuple[int, ...] = ()  # nodes that must come first though no value flows: earlier writes, earlier calls
    uses: tuple[str, ...] = ()  # parameters of other modules that a module or block reads
    shares: tuple[int, ...] = ()  # nodes that made the memory its results look at, where others did
    changes: tuple[str, ...] = ()  # modules that keep something of its run: batch statistics, counters, caches
    random: bool = False
    checkpoint: str = ""  # "" | "reentrant" | "saved": how the original recomputes this node
    reason: str = ""  # why a block is a block
    role: str = ""  # in a rolled graph: what it is for the whole batch (`gemini.capture.sample_loops`)

    def inputs(self) -> Iterator[Ref]:
        """The values it reads, those inside size expressions included."""
        yield from refs(self.args)
        yield from refs(self.kwargs)

    @property
    def dependencies(self) -> list[int]:
        """The nodes it needs, each once, ascending."""
        return sorted({ref.node for ref in self.inputs()} | set(self.after))

    @property
    def is_source(self) -> bool:
        """Whether it only brings a tensor into the graph."""
        return self.kind in SOURCES


@dataclass(frozen=True)
class Guard:
    """A fact the model's Python relied on: `expr` evaluated to `expected` when the trace had run `position` nodes."""

    expr: Expr
    expected: Any
    position: int
    scope: tuple[str, ...]
    line: str
    data: bool = False  # depends on tensor contents, not only on sizes
    concrete: bool = False  # a traced number became a plain one

    def __str__(self) -> str:
        return f"{self.expr} is {self.expected!r} ({self.line})"
