"""Registry of shard rules: from the name of an op to its rule, before the batch rules.

A rule gets a `ShardQuery` with the layouts of its arguments and returns those of the results, or raises
`AnalysisRefused`. An installed package registers its rules in modules that it names as entry points:

    [project.entry-points."gemini.shard_rules"]
    my_ops = "my_package.shard_rules"
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gemini.batch_analysis.batch_kinds import Kind
from gemini.batch_analysis.rules.registry import Rule, find_rule
from gemini.entry_points import entry_points
from gemini.errors import ShardingError
from gemini.tensor_parallel.annotation import Annotation

if TYPE_CHECKING:
    from gemini.tensor_parallel.shard_query import ShardQuery

ShardRule = Callable[["ShardQuery"], Kind | Sequence[Kind]]
LayoutProposal = Callable[["ShardQuery"], Iterable[Mapping[Any, Kind]]]
_Any = TypeVar("_Any", bound=Callable[..., Any])

GROUP = "gemini.shard_rules"
SHARD_RULES: dict[str, ShardRule] = {}
PROPOSALS: dict[str, LayoutProposal] = {}
_PARTS = ("weights", "sums", "attention", "vocabulary_split", "regroup", "recurrent")


def shard_rule(*names: str) -> Callable[[_Any], _Any]:
    """Register a shard rule for ops of these names."""

    def register(function: _Any) -> _Any:
        SHARD_RULES.update(dict.fromkeys(names, function))
        return function

    return register


def proposes_layouts(*names: str) -> Callable[[_Any], _Any]:
    """Register which layouts to try for ops of these names, of more arguments than all layouts could be tried for.

    The function gets the op with all arguments whole, and yields the divided ones by key.
    """

    def register(function: _Any) -> _Any:
        PROPOSALS.update(dict.fromkeys(names, function))
        return function

    return register


def annotate(name: str, text: str, *, linear: bool = False) -> None:
    """Register an annotation, such as `"b s h, h^ o -> b s o"`, as the rule of an op."""
    SHARD_RULES[name] = Annotation.read(text, linear=linear)


def find_shard_rule(name: str) -> ShardRule | None:
    """Return the shard rule of a short name, or of `module:Class` of a custom autograd function."""
    _load()
    return SHARD_RULES.get(name)


def find_proposal(name: str) -> LayoutProposal | None:
    """Return what proposes layouts of an op; None: all are tried."""
    _load()
    return PROPOSALS.get(name)


def batch_rule(name: str) -> Rule:
    """Return the batch rule of a name, which a shard rule extends."""
    found = find_rule(name)
    assert found is not None, name
    return found


@functools.cache
def _load() -> None:
    for part in _PARTS:
        importlib.import_module(f"gemini.tensor_parallel.rules.{part}")
    for entry in entry_points(GROUP):
        try:
            importlib.import_module(entry.value)
        except Exception as error:
            raise ShardingError(
                f"the shard rules {entry.name} ({entry.value}) cannot be imported: {type(error).__name__}: {error}\n"
                "    → repair or uninstall the package that declares them"
            ) from error
