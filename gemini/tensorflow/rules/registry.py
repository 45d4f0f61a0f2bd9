"""The rules of all forward ops, by type, and the ops that are no function of their inputs."""

from __future__ import annotations

from gemini.tensorflow.rules import elementwise_ops, layer_ops, shape_ops
from gemini.tensorflow.split_way import Rule

RULES: dict[str, Rule] = {**elementwise_ops.RULES, **shape_ops.RULES, **layer_ops.RULES}

RANDOM = frozenset(
    """RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt ParameterizedTruncatedNormal RandomGamma
    RandomPoisson RandomPoissonV2 Multinomial RandomShuffle StatelessMultinomial""".split()
)
"""They draw numbers; the first input of most is the shape of the result."""

STATEFUL = frozenset(
    """VarHandleOp ReadVariableOp ResourceGather ResourceGatherNd VarIsInitializedOp While If HashTableV2
    LookupTableFindV2 LookupTableSizeV2 Placeholder PlaceholderWithDefault""".split()
)
"""Stateful by TensorFlow's definition, but reading only: they may run once more, or on pieces."""

SOURCES = frozenset(
    """IteratorGetNext IteratorGetNextSync QueueDequeueV2 QueueDequeueManyV2 QueueDequeueUpToV2 ReaderReadV2
    GetNext""".split()
)
"""They consume data: each step runs them once, and the twin takes the result as a feed."""

GUARDS = frozenset("Assert Print PrintV2 NoOp".split())
"""Allowed in front of forward ops for order alone."""
