"""Finding: one recognised piece of source, and the kinds of findings."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Kind:
    """A kind of finding, and its colour in tables and pictures."""

    name: str
    meaning: str
    colour: str  # "#rrggbb": light enough to carry dark text


_ALL = (
    Kind("model", "a model class, an instance of one, or a function that builds or is a model", "#c9b8f5"),
    Kind("layer", "a layer or sub-module", "#a9cdf7"),
    Kind("op", "a functional operation on tensors", "#cfe6fb"),
    Kind("loss", "a loss, constructed or computed", "#f9b9b7"),
    Kind("optimizer", "an optimizer, constructed", "#f7cf8e"),
    Kind("scheduler", "a learning-rate schedule, constructed or stepped", "#f5e3b3"),
    Kind("data", "a data set, loader or input", "#b9e4c4"),
    Kind("device", "a placement on a device", "#b5e2e0"),
    Kind("checkpoint", "saving or loading state", "#dcd3c8"),
    Kind("session", "a TensorFlow session or strategy scope", "#e2dcf3"),
    Kind("trainer", "an object of a library that runs the training loop", "#e8c7ec"),
    Kind("train loop", "a loop that trains, or a call that runs one", "#8fd19e"),
    Kind("eval loop", "a loop that evaluates, or a call that runs one", "#c5e8a5"),
    Kind("train step", "a function that does one training step", "#a8dcb3"),
    Kind("forward", "the model is called", "#d8c8fb"),
    Kind("backward", "gradients are computed", "#f6a3c0"),
    Kind("step", "the optimizer steps", "#f9c074"),
    Kind("zero grad", "gradients are cleared", "#ece7d0"),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _ALL}


@dataclass(frozen=True, order=True)
class Finding:
    """One recognised piece of source. Lines count from 1, columns from 0 (in UTF-8 bytes, like `ast`)."""

    file: str
    line: int
    column: int
    end_line: int
    end_column: int
    kind: str
    name: str  # the framework's or the user's object, qualified: "torch.nn.Linear", "net.Net", "loss.backward"
    text: str  # the source on one line
    is_statement: bool = False  # a class, function or loop, not an expression

    @property
    def where(self) -> str:
        """`file:line`, as editors and compilers write it."""
        return f"{self.file}:{self.line}"

    def to_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        return asdict(self)
