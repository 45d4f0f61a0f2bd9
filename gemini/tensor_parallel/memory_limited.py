"""Memory-limited choice: the least sum of tables under a hard limit of bytes, by CP-SAT.

A table becomes a Boolean per kind of its rows and columns, and a cost per combination. Costs are rounded to integers,
one part in 10⁶ of the largest difference.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemini.cpsat_library import import_cpsat
from gemini.tensor_parallel.elimination import Factor, Table

_UNITS = 10**6  # of the largest finite cost that matters
_EFFORT = 20.0  # about seconds
_NEVER = 1e12  # ms and more: no choice


@dataclass(frozen=True)
class LimitedMinimum:
    """A value per variable; `proven`: no other choice within the limit is better."""

    total: float
    values: list[int]
    proven: bool


@dataclass(frozen=True)
class ByteLimit:
    """Bytes of some values of variables, which must add up to no more than `limit`."""

    limit: float
    bytes: Mapping[tuple[int, int], float]


def minimize_limited(
    domains: Sequence[int],
    factors: Sequence[Factor],
    limit: ByteLimit | None = None,
    hint: Sequence[int] | None = None,
    effort: float = _EFFORT,
) -> LimitedMinimum | None:
    """Return the best choice found within the limit; None where there is none, or none was found."""
    module = import_cpsat()
    model = module.CpModel()
    chosen = [[model.new_bool_var(f"{one}={value}") for value in range(size)] for one, size in enumerate(domains)]
    for own in chosen:
        model.add_exactly_one(own)
    scale = _UNITS / max(_spread(factors), 1e-30)
    terms: list[Any] = []
    for variables, table in factors:
        terms += _table_terms(model, [chosen[one] for one in variables], table, scale)
    if limit is not None:
        weights = [(chosen[one][value], round(size)) for (one, value), size in limit.bytes.items()]
        model.add(sum(variable * size for variable, size in weights) <= int(limit.limit))
    model.minimize(sum(terms))
    if hint is not None:
        for own, value in zip(chosen, hint, strict=True):
            for at, variable in enumerate(own):
                model.add_hint(variable, at == value)
    return _solution(module, model, chosen, factors, effort)


def _solution(
    module: Any, model: Any, chosen: list[list[Any]], factors: Sequence[Factor], effort: float
) -> LimitedMinimum | None:
    solver = module.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = effort * 5
    status = solver.solve(model)
    if status not in (module.OPTIMAL, module.FEASIBLE):
        return None
    values = [next(at for at, variable in enumerate(own) if solver.boolean_value(variable)) for own in chosen]
    total = sum(float(table[tuple(values[one] for one in variables)]) for variables, table in factors)
    return LimitedMinimum(total, values, status == module.OPTIMAL)


def _spread(factors: Sequence[Factor]) -> float:
    """Return the largest difference that a table makes, choices that are none apart."""
    spreads = [float(np.ptp(finite)) for _, table in factors if (finite := table[table < _NEVER]).size]
    return max(spreads, default=0.0)


def _table_terms(model: Any, chosen: list[list[Any]], table: Table, scale: float) -> list[Any]:
    """Add a table; return the terms of the objective."""
    kinds, small = [], table
    for axis, own in enumerate(chosen):
        rows, index = np.unique(np.moveaxis(small, axis, 0).reshape(small.shape[axis], -1), axis=0, return_inverse=True)
        first = [int(np.argmax(index == kind)) for kind in range(len(rows))]
        small = np.take(small, first, axis)
        kinds.append([_any_of(model, [own[at] for at in np.flatnonzero(index == kind)]) for kind in range(len(rows))])
    finite = small[small < _NEVER]
    least = float(finite.min()) if finite.size else 0.0
    terms: list[Any] = []
    for at in itertools.product(*map(range, small.shape)):
        picked = [own[one] for own, one in zip(kinds, at, strict=True)]
        if small[at] >= _NEVER:
            model.add_bool_or([one.negated() for one in picked])
        elif (cost := round((float(small[at]) - least) * scale)) > 0:
            if len(picked) == 1:
                terms.append(picked[0] * cost)
            else:
                both = model.new_bool_var("")
                model.add_bool_or([both, *(one.negated() for one in picked)])
                terms.append(both * cost)
    return terms


def _any_of(model: Any, variables: list[Any]) -> Any:
    if len(variables) == 1:
        return variables[0]
    found = model.new_bool_var("")
    model.add(sum(variables) == found)
    return found
