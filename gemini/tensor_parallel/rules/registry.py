"""Registry of shard rules: from the short name of an op to its rule, before the batch rules.

A rule gets a `ShardQuery` with the layouts of its arguments and returns those of the results, or raises
`AnalysisRefused`.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from gemini.batch_analysis.batch_kinds import Kind
from gemini.batch_analysis.rules.registry import Rule, find_rule

if TYPE_CHECKING:
    from gemini.tensor_parallel.shard_query import ShardQuery

ShardRule = Callable[["ShardQuery"], Kind | Sequence[Kind]]
_Any = TypeVar("_Any", bound=ShardRule)

SHARD_RULES: dict[str, ShardRule] = {}
_PARTS = ("weights", "sums", "attention", "vocabulary_split", "regroup")


def shard_rule(*names: str) -> Callable[[_Any], _Any]:
    """Register a shard rule for ops of these names."""

    def register(function: _Any) -> _Any:
        SHARD_RULES.update(dict.fromkeys(names, function))
        return function

    return register


def find_shard_rule(name: str) -> ShardRule | None:
    """Return the shard rule of a short name."""
    _load()
    return SHARD_RULES.get(name)


def batch_rule(name: str) -> Rule:
    """Return the batch rule of a name, which a shard rule extends."""
    found = find_rule(name)
    assert found is not None, name
    return found


@functools.cache
def _load() -> None:
    for part in _PARTS:
        importlib.import_module(f"gemini.tensor_parallel.rules.{part}")
