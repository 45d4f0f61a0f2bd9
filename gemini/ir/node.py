"""Nodes and guards: the parts of a graph, as plain data.

| kind                            | target                | is                                                      |
|---------------------------------|-----------------------|---------------------------------------------------------|
| input                           | path in the call      | a tensor the caller passes                              |
| parameter, buffer, attribute    | name in the model     | a tensor of the model                                   |
| op                              | `torch.Tensor.add`    | one torch function                                      |
| function                        | `package.mod:Class`   | a custom autograd function                              |
| call                            | `package.mod:name`    | an opaque Python function of the model's glue           |
| module                          | `encoder.layer.0.fc`  | a leaf module                                           |
| block                           | `encoder.layer.0`     | a basic block: an opaque module, whose Python runs      |

*Glue* is the Python of the model between leaf modules.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from gemini.ir.autograd_modes import Region
from gemini.ir.pytree import Form, MappingForm, Path, Ref, SequenceForm, refs
from gemini.ir.symint import Expr

SOURCES = ("input", "parameter", "buffer", "attribute")
MODULES = ("module", "block")
EMPTY_ARGS = SequenceForm(tuple, ())
EMPTY_KWARGS = MappingForm(dict, ())


@dataclass(frozen=True)
class TensorMeta:
    """Metadata of a tensor value: its size on the captured batch, its batch dimension, its layout."""

    shape: tuple[int, ...]
    dtype: str
    device: str
    requires_grad: bool
    batch_dim: int | None = None
    batch_factor: int = 1  # entries per sample; > 1 where the batch dimension is flattened with another
    strides: tuple[int, ...] | None = None  # None: contiguous
    dynamic_dims: tuple[int, ...] = field(default=(), compare=False, repr=False)  # their sizes depend on contents

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for size in self.shape:
            count *= size
        return count


@dataclass
class Node:
    """One operation of a captured model."""

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
    out_spec: str = "T"  # the structure of the result, which later runs must return too
    outputs: dict[tuple[str, Path], TensorMeta] = field(default_factory=dict)
    mutates: tuple[Ref, ...] = ()
    after: tuple[int, ...] = ()  # nodes that must run first without a dataflow edge: earlier writes, earlier calls
    uses: tuple[str, ...] = ()  # parameters of other modules that a module or block reads
    shares: tuple[int, ...] = ()  # nodes that allocated the memory of its results, if other than itself
    changes: tuple[str, ...] = ()  # modules whose state its run changes: batch statistics, counters, caches
    random: bool = False
    checkpoint: str = ""  # how the original recomputes it: "" | "reentrant" | "saved"; after "own " its forward does
    recomputed: int = 0  # the number of the checkpoint that it ran in, where the inside of this is recorded
    reason: str = ""  # why a block is a block
    role: str = ""  # in a rolled graph: its role for the whole batch (`gemini.capture.sample_loops`)

    def inputs(self) -> Iterator[Ref]:
        """Yield the values it reads, those in size expressions included."""
        yield from refs(self.args)
        yield from refs(self.kwargs)

    @property
    def dependencies(self) -> list[int]:
        """The nodes that must run before it, ascending."""
        return sorted({ref.node for ref in self.inputs()} | set(self.after))

    @property
    def is_source(self) -> bool:
        """Whether it only brings an input or a tensor of the model into the graph."""
        return self.kind in SOURCES

    @property
    def wrapped(self) -> str:
        """The kind of checkpoint that the caller applies to the node; "" where its own forward applies one."""
        return "" if self.checkpoint.startswith("own ") else self.checkpoint


@dataclass(frozen=True)
class Guard:
    """A condition of the model's Python: `expr` evaluated to `expected` after `position` nodes of the trace."""

    expr: Expr
    expected: Any
    position: int
    scope: tuple[str, ...]
    line: str
    data: bool = False  # depends on tensor contents, not only on sizes
    concrete: bool = False  # a traced number became a plain one

    def __str__(self) -> str:
        return f"{self.expr} is {self.expected!r} ({self.line})"
