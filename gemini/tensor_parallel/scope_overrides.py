"""Scope overrides: the strategies that the options of the user leave to a node."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from gemini.ir.graph import Graph
from gemini.ir.pytree import Ref
from gemini.nearest_name import nearest
from gemini.tensor_parallel.layouts import Partial, Shard
from gemini.tensor_parallel.node_ports import NodeCall
from gemini.tensor_parallel.shard_options import (
    REDUCTION,
    REPLICATED,
    SHARDED,
    ScopeOverride,
    ShardOptions,
    UnknownScopeError,
)
from gemini.tensor_parallel.strategies import Strategy, is_divided

_VIEWS = ("transpose", "t", "get_T", "get_mT", "to", "view", "reshape", "permute", "contiguous")


class ScopeChoices:
    """The choice of the user for every node of a graph."""

    def __init__(self, graph: Graph, options: ShardOptions) -> None:
        self.options = options
        self.matches = match_scopes(graph.bound_model(), options.overrides)
        self._weights: set[Ref] = set()  # parameters, and views of them
        self._names: dict[Ref | str, str] = {
            Ref(node.id): node.target for node in graph.nodes if node.kind == "parameter"
        }

    def choice(self, call: NodeCall) -> str | int | None:
        """Return the choice for a node: that of its most specific override, else that for the model."""
        node = call.node
        own = {*node.scope, node.target if node.kind in ("module", "block") else ""} - {""}
        own |= {port.key for port in call.inputs if isinstance(port.key, str)}
        own |= {name for port in call.inputs if (name := self._names.get(port.key))}
        found = [one for one in self.options.overrides if own & self.matches[one]]
        if found:
            return max(found, key=lambda one: max(len(name) for name in own & self.matches[one])).choice
        return self.options.dim

    def admitted(self, call: NodeCall, strategies: Sequence[Strategy]) -> list[Strategy]:
        """Return the strategies that the choice for a node admits; those that run it whole always."""
        choice = self.choice(call)
        if choice is None:
            return list(strategies)
        whole = [one for one in strategies if not is_divided(one)]
        if choice == REPLICATED:
            return whole
        weights = [at for at, port in enumerate(call.inputs) if len(port.shape) > 1 and self._is_weight(port.key)]
        if not weights:
            return list(strategies)
        divided = [one for one in strategies if any(isinstance(one.inputs[at], Shard) for at in weights)]
        if choice != SHARDED:
            wanted = Partial if choice == REDUCTION else Shard
            divided = [one for one in divided if all(isinstance(layout, wanted) for layout in one.results)]
        return divided if divided and choice == SHARDED else [*whole, *divided]

    def _is_weight(self, key: Ref | str) -> bool:
        return isinstance(key, str) or key in self._weights

    def add(self, call: NodeCall) -> None:
        """Note the values of a node that are parameters, or views of them."""
        node = call.node
        if node.kind == "parameter" or (
            call.name in _VIEWS and call.inputs and all(self._is_weight(port.key) for port in call.inputs)
        ):
            self._weights.update(port.ref for port in call.results)


def match_scopes(model: nn.Module, overrides: Iterable[ScopeOverride]) -> dict[ScopeOverride, set[str]]:
    """Return the modules and parameters that each override selects; raises UnknownScopeError where there is none."""
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    names += [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {one: set(_matched(one, names)) for one in overrides}


def _matched(override: ScopeOverride, names: Sequence[str]) -> list[str]:
    """Return the names that an override selects; raise ShardingError where there is none."""
    pattern = "[^.]*".join(re.escape(part) for part in override.scope.split("*"))
    found = [name for name in names if re.fullmatch(pattern, name)]
    if not found:
        close = nearest(override.scope, [name for name in names if name])
        hint = (
            f"did you mean {close!r}?"
            if close
            else "write the name of a module or parameter, `*` for a part between dots"
        )
        raise UnknownScopeError(f"the model has no scope {override.scope!r} to override\n    → {hint}")
    return found
