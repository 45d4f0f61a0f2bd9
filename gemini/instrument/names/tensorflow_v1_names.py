"""Names of TensorFlow 1 that TensorFlow 2 does not have, without importing TensorFlow."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FILE = Path(__file__).with_suffix(".txt")

CONTRIB = frozenset(
    ["cluster_resolver", "data", "framework", "layers", "metrics", "opt", "rnn", "seq2seq", "tpu", "training"]
)
"""The parts of tf.contrib that `gemini.tensorflow.compat` has."""

LOST = ("contrib", "estimator", "keras", "layers", "nn.rnn_cell")
"""Names that even `tf.compat.v1` no longer has, or has only for Keras 2."""

KEYWORDS = frozenset(["keep_dims", "keep_prob", "reduction_indices", "squeeze_dims"])
"""Keywords that only functions of TensorFlow 1 take."""


@cache
def v1_names() -> frozenset[str]:
    """Return the qualified names, such as `tensorflow.Session` and `tensorflow.train.Saver`."""
    names: set[str] = set()
    module = ""
    for line in _FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            names.update(f"{module}.{name}" for name in line.split())
        elif not line.startswith("#"):
            module = line
    return frozenset(names)


def is_v1_name(qualified: str) -> bool:
    """Return whether a qualified name, or a module in front of it, exists in TensorFlow 1 only."""
    return any(prefix in v1_names() for prefix in _prefixes(qualified))


def is_lost_name(qualified: str) -> bool:
    """Return whether a name below `tensorflow.compat.v1` is one that this module has lost."""
    start = "tensorflow.compat.v1."
    return qualified.startswith(start) and any(
        prefix in LOST for prefix in _prefixes(qualified.removeprefix(start)) if prefix != "keras"
    )


def _prefixes(qualified: str) -> list[str]:
    parts = qualified.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
