"""Elimination: the exact minimum of a sum of tables over discrete variables.

Variables are eliminated one by one: the tables that mention a variable are added up, and the minimum over it is a table
over their other variables. Time and memory grow with the largest of these tables, which stays small where the tables
form a narrow graph, as those of a model do; the variable with the smallest table is next.

Where a table would be too large, values that are in no optimum are removed first: a value is dominated if another is
better whatever the neighbours are (Goldstein's criterion of dead-end elimination). If that is not enough, the variables
with most neighbours are fixed at their best values for themselves; the result is then a minimum of what is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

Table = npt.NDArray[np.float64]
Factor = tuple[tuple[int, ...], Table]

_LARGEST = 20_000_000  # entries of a table
_WIDE = 64  # values of a variable that are not compared pair by pair
_INFINITE = 1e18


@dataclass(frozen=True)
class Minimum:
    """A value per variable, and the sum of all factors there; `exact`: no other choice has a smaller one."""

    total: float
    values: list[int]
    exact: bool = True


def minimize(domains: Sequence[int], factors: Sequence[Factor]) -> Minimum:
    """Return the minimum of the sum of all factors."""
    found = _eliminate(domains, factors)
    if found is not None:
        return Minimum(*found)
    kept = _undominated(domains, factors)
    fixed, more = 0, 1
    while True:
        sizes = [len(some) for some in kept]
        small = [(variables, table[np.ix_(*(kept[one] for one in variables))]) for variables, table in factors]
        found = _eliminate(sizes, small)
        if found is not None:
            values = [int(some[at]) for some, at in zip(kept, found[1], strict=True)]
            return Minimum(found[0], values, not fixed)
        for one in _widest(sizes, small)[:more]:
            kept[one] = kept[one][[_best_alone(one, small)]]
            fixed += 1
        more *= 2


def _eliminate(domains: Sequence[int], factors: Sequence[Factor]) -> tuple[float, list[int]] | None:
    """Return the minimum and a value per variable that reaches it; None where a table would be too large."""
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
            return None
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


def _mentions(count: int, factors: Sequence[Factor]) -> list[list[tuple[Factor, int]]]:
    """Return, for every variable, the factors that mention it and its axis there."""
    found: list[list[tuple[Factor, int]]] = [[] for _ in range(count)]
    for factor in factors:
        for axis, variable in enumerate(factor[0]):
            found[variable].append((factor, axis))
    return found


def _undominated(domains: Sequence[int], factors: Sequence[Factor]) -> list[npt.NDArray[np.intp]]:
    """Return the values of every variable without those that are never better than another."""
    mentions = _mentions(len(domains), factors)
    kept = [np.arange(size) for size in domains]
    changed = True
    while changed:
        changed = False
        for variable, mine in enumerate(mentions):
            if len(kept[variable]) < 2 or any(len(kept[one]) > _WIDE for (some, _), _ in mine for one in some):
                continue
            gain = np.zeros((len(kept[variable]),) * 2)  # least gain of the second value over the first
            for (variables, table), axis in mine:
                part = np.moveaxis(table[np.ix_(*(kept[one] for one in variables))], axis, 0)
                rows = np.minimum(part.reshape(len(kept[variable]), -1), _INFINITE)
                gain += (rows[:, None, :] - rows[None, :, :]).min(axis=-1)
            worse = (gain > 0) | ((gain == 0) & np.tri(len(gain), k=-1, dtype=bool))
            np.fill_diagonal(worse, False)
            if worse.any():
                stays = ~worse.any(axis=1)
                changed |= not stays.all()
                kept[variable] = kept[variable][stays]
    return kept


def _widest(domains: Sequence[int], factors: Sequence[Factor]) -> list[int]:
    """Return the variables with a choice, those with the largest tables of all their neighbours first."""
    near = [{one} for one in range(len(domains))]
    for variables, _ in factors:
        for one in variables:
            near[one].update(variables)
    sizes = {one: prod(domains[other] for other in near[one]) for one, size in enumerate(domains) if size > 1}
    return sorted(sizes, key=lambda one: (-sizes[one], one))


def _best_alone(variable: int, factors: Sequence[Factor]) -> int:
    """Return the value of a variable that is best if all neighbours follow it."""
    total: float | npt.NDArray[np.float64] = 0.0
    for variables, table in factors:
        if variable in variables:
            axis = variables.index(variable)
            total = total + np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1).min(axis=1)
    return int(np.argmin(total))


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
