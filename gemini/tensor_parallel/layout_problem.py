"""Layout problem: one strategy per class of nodes, at the least time, as tables over strategies.

    one factor per value       conversions between the layout of its maker and those that its readers want, once each
    one factor per parameter   its conversions, and the bytes that are replicated
    one factor per node        its time on a shard

A value with many readers gets a variable of its own: the set of versions that exist. Then every factor mentions two
variables, and no table grows with the number of readers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod

import numpy as np

from gemini.tensor_parallel.elimination import Factor, Minimum, Table, minimize
from gemini.tensor_parallel.layouts import REPLICATE, Layout, Shard
from gemini.tensor_parallel.memory_limited import ByteLimit, LimitedMinimum, minimize_limited
from gemini.tensor_parallel.node_ports import NodeCall
from gemini.tensor_parallel.strategies import Strategy

_WIDE = 30_000  # entries of a direct table
_VERSIONS = 4  # of a value with a variable of its own

Cost = Callable[[Layout, frozenset[Layout]], float]
Use = tuple[int, int]  # a variable, and a port of its nodes
_Part = tuple[Layout | None, frozenset[Layout]]  # what a strategy makes and wants of a value


@dataclass
class Variable:
    """A class of nodes that share one strategy."""

    nodes: list[int]
    call: NodeCall  # of the first node
    strategies: list[Strategy]
    work_ms: float = 0.0
    refusal: str = ""


@dataclass
class LayoutProblem:
    """Variables and the tables over them: times, and replicated bytes of parameters."""

    variables: list[Variable]
    domains: list[int] = field(default_factory=list)
    times: list[Factor] = field(default_factory=list)
    tensors: list[tuple[tuple[int, ...], list[tuple[Table, float]], float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.domains = [len(variable.strategies) for variable in self.variables]

    # ── factors ────────────────────────────────────────────────────────────────────────────────────────────────────
    def add_node(self, variable: int, times: Sequence[float]) -> None:
        """Add the times of the strategies of a variable."""
        self.times.append(((variable,), np.array(times, dtype=float)))

    def add_value(self, maker: Use | None, users: Sequence[Use], cost: Cost) -> None:
        """Add the cost of a value; without a maker it arrives whole."""
        for variables, table in self._value_tables(maker, users, cost):
            self.times.append((variables, table))

    def add_tensor(self, users: Sequence[Use], whole: Cost, sliced: Cost, size: float, held: float) -> None:
        """Add a parameter of `size` bytes: its cost if every shard stores it whole, and if each stores a slice.

        `held` are the bytes with gradient and optimizer, for a memory limit.
        """
        variables = tuple(sorted({variable for variable, _ in users}))
        if self._is_wide(variables):
            versions, sets = self._versions(users)
            wants: list[list[_Part]] = [[(None, some) for some in sets]]
            variables = (versions,)
        else:
            variables, wants = self._wants(None, users)
        tables = [_table(wants, cost) for cost in (whole, sliced)]
        self.tensors.append((variables, [(tables[0], size), (tables[1], 0.0)], held))

    def _is_wide(self, variables: Sequence[int]) -> bool:
        return prod(self.domains[one] for one in variables) > _WIDE

    def _value_tables(self, maker: Use | None, users: Sequence[Use], cost: Cost) -> Iterable[Factor]:
        variables = tuple(sorted({variable for variable, _ in (*users, *([maker] if maker else []))}))
        if not self._is_wide(variables):
            variables, wants = self._wants(maker, users)
            yield variables, _table(wants, cost)
            return
        versions, sets = self._versions(users)
        if maker is None:
            yield (versions,), np.array([cost(REPLICATE, some) for some in sets])
        else:
            made = [one.results[maker[1]] for one in self.variables[maker[0]].strategies]
            rows = {layout: [cost(layout, some) for some in sets] for layout in dict.fromkeys(made)}
            yield (maker[0], versions), np.array([rows[layout] for layout in made])

    def _wants(self, maker: Use | None, users: Sequence[Use]) -> tuple[tuple[int, ...], list[list[_Part]]]:
        """Return the variables of a value, and what each strategy of each makes and wants."""
        ports = ([maker] if maker else []) + list(users)
        variables = tuple(sorted({variable for variable, _ in ports}))
        parts = []
        for variable in variables:
            own = [port for one, port in users if one == variable]
            made = maker[1] if maker is not None and maker[0] == variable else None
            parts.append([
                (None if made is None else one.results[made], frozenset(one.inputs[port] for port in own))
                for one in self.variables[variable].strategies
            ])  # fmt: skip
        return variables, parts

    def _versions(self, users: Sequence[Use]) -> tuple[int, list[frozenset[Layout]]]:
        """Add a variable, the set of versions that exist: what every reader wants is among them."""
        wanted = list(dict.fromkeys(one.inputs[port] for variable, port in users
                                    for one in self.variables[variable].strategies))  # fmt: skip
        sets = [frozenset(some) for count in range(1, _VERSIONS + 1) for some in itertools.combinations(wanted, count)]
        versions = len(self.domains)
        self.domains.append(len(sets))
        for variable in sorted({one for one, _ in users}):
            ports = [port for one, port in users if one == variable]
            own = [frozenset(one.inputs[port] for port in ports) for one in self.variables[variable].strategies]
            table = np.array([[0.0 if some <= has else np.inf for has in sets] for some in own])
            self.times.append(((variable, versions), table))
        return versions, sets

    # ── solution ───────────────────────────────────────────────────────────────────────────────────────────────────
    def factors(self, price: float) -> list[Factor]:
        """Return all factors, in ms, at a price in ms per replicated byte."""
        stored = [
            (variables, np.minimum.reduce([table + price * size for table, size in options]))
            for variables, options, _ in self.tensors
        ]
        return [*self.times, *stored]

    def solve(self, price: float) -> Minimum:
        """Return the strategy of every variable at a price of replicated bytes."""
        found = minimize(self.domains, self.factors(price))
        return replace(found, values=found.values[: len(self.variables)])

    def solve_limited(self, limit: float, size: int) -> LimitedMinimum | None:
        """Return the best strategies with at most `limit` bytes held for parameters on each of `size` shards."""
        domains, factors, bytes_of = list(self.domains), list(self.times), {}
        for variables, ((whole, _), (sliced, _)), held in self.tensors:
            stored = len(domains)
            domains.append(2)
            factors.append(((*variables, stored), np.stack([whole, sliced], axis=-1)))
            bytes_of.update({(stored, 0): held, (stored, 1): held / size})
        found = minimize_limited(domains, factors, ByteLimit(limit, bytes_of))
        return found and replace(found, values=found.values[: len(self.variables)])


@cache
def is_sharded(layout: Layout) -> bool:
    """Whether a shard has only a slice."""
    return isinstance(layout, Shard)


def _table(parts: list[list[_Part]], cost: Cost) -> Table:
    """Return the cost of a value for all strategies of its variables; equal parts are priced once."""
    kinds = [list(dict.fromkeys(own)) for own in parts]
    small = np.empty([len(own) for own in kinds])
    for at in np.ndindex(*small.shape):
        picked = [own[i] for own, i in zip(kinds, at, strict=True)]
        have = next((made for made, _ in picked if made is not None), REPLICATE)
        small[at] = cost(have, frozenset().union(*(wanted for _, wanted in picked)))
    index = [[own.index(part) for part in all_parts] for own, all_parts in zip(kinds, parts, strict=True)]
    table: Table = small[np.ix_(*index)]
    return table
