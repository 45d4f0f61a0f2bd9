"""Elimination: the exact minimum of a sum of tables over discrete variables.

Variables are eliminated one by one: the tables that mention a variable are added up, and the minimum over it is a table
over their other variables. Time and memory grow with the largest of these tables, which stays small where the tables
form a narrow graph, as those of a model do; the variable with the smallest table is next.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from gemini.errors import ShardingError

Table = npt.NDArray[np.float64]
Factor = tuple[tuple[int, ...], Table]

_LARGEST = 60_000_000  # entries of a table


def eliminate(domains: Sequence[int], factors: Sequence[Factor]) -> tuple[float, list[int]]:
    """Return the minimum of the sum of all factors, and a value per variable that reaches it."""
    live: dict[int, Factor] = dict(enumerate(factors))
    of: list[set[int]] = [set() for _ in domains]  # the factors that mention a variable
    for number, (variables, _) in live.items():
        for variable in variables:
            of[variable].add(number)
    sizes = [_table_size(variable, of, live, domains) for variable in range(len(domains))]
    left, order = set(range(len(domains))), []
    choices: dict[int, tuple[tuple[int, ...], npt.NDArray[np.intp]]] = {}
    fresh = len(live)
    while left:
        variable = min(left, key=lambda one: (sizes[one], one))
        if sizes[variable] > _LARGEST:
            raise ShardingError(f"the layouts of this model depend on each other too widely ({sizes[variable]} cases)")
        mine = [live.pop(number) for number in sorted(of[variable])]
        others = tuple(sorted({other for variables, _ in mine for other in variables} - {variable}))
        total = _sum(mine, (*others, variable), domains)
        choices[variable] = (others, total.argmin(axis=-1))
        order.append(variable)
        left.discard(variable)
        live[fresh] = (others, total.min(axis=-1))
        for other in others:
            of[other] = {number for number in of[other] if number in live} | {fresh}
        for other in others:
            sizes[other] = _table_size(other, of, live, domains)
        fresh += 1
    found = [0] * len(domains)
    for variable in reversed(order):
        others, best = choices[variable]
        found[variable] = int(best[tuple(found[other] for other in others)])
    return float(sum(float(table) for _, table in live.values())), found


def _table_size(variable: int, of: list[set[int]], live: dict[int, Factor], domains: Sequence[int]) -> int:
    near = {other for number in of[variable] for other in live[number][0]} | {variable}
    return prod(domains[one] for one in near)


def _sum(factors: list[Factor], axes: tuple[int, ...], domains: Sequence[int]) -> Table:
    """Return the sum of factors as a table over `axes`."""
    total: Table = np.zeros([domains[one] for one in axes])
    for variables, table in factors:
        at = {variable: place for place, variable in enumerate(variables)}
        moved = np.transpose(table, [at[one] for one in axes if one in at])
        total += moved.reshape([domains[one] if one in at else 1 for one in axes])
    return total
