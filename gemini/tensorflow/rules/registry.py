"""The rules of all forward ops, by type, and the ops that are no function of their inputs."""

from __future__ import annotations

from gemini.tensorflow.rules import elementwise_ops, entry_moves, layer_ops
from gemini.tensorflow.split_way import Rule

RULES: dict[str, Rule] = {**elementwise_ops.RULES, **entry_moves.RULES, **layer_ops.RULES}

_RANDOM_NAMES = """
    RandomUniform RandomStandardNormal TruncatedNormal RandomUniformInt ParameterizedTruncatedNormal RandomGamma
    RandomPoisson RandomPoissonV2 Multinomial RandomShuffle StatelessMultinomial
"""
_SAMPLER_NAMES = """
    LogUniformCandidateSampler UniformCandidateSampler LearnedUnigramCandidateSampler FixedUnigramCandidateSampler
    ThreadUnsafeUnigramCandidateSampler AllCandidateSampler
"""
SAMPLERS = frozenset(_SAMPLER_NAMES.split())
"""They draw classes; their input is the labels of the batch."""

RANDOM = frozenset(_RANDOM_NAMES.split()) | SAMPLERS
"""They draw numbers; the first input of the others is the shape of the result."""

_STATEFUL_NAMES = """
    VarHandleOp ReadVariableOp ResourceGather ResourceGatherNd VarIsInitializedOp While If HashTableV2
    LookupTableFindV2 LookupTableSizeV2 Placeholder PlaceholderWithDefault
"""
STATEFUL = frozenset(_STATEFUL_NAMES.split())
"""Stateful by TensorFlow's definition, but reading only: they may run once more, or on pieces."""

_SOURCES_NAMES = """
    IteratorGetNext IteratorGetNextSync QueueDequeueV2 QueueDequeueManyV2 QueueDequeueUpToV2 ReaderReadV2
    GetNext
"""
SOURCES = frozenset(_SOURCES_NAMES.split())
"""They consume data: each step runs them once, and the twin takes the result as a feed."""

GUARDS = frozenset(["Assert", "Print", "PrintV2", "NoOp"])
"""Allowed in front of forward ops for order alone."""
