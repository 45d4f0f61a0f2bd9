"""The minimum of tables: that of trying everything, and valid where only a part could be searched."""

import itertools

import numpy as np
import pytest

from gemini.tensor_parallel import elimination
from gemini.tensor_parallel.elimination import minimize

pytestmark = pytest.mark.unit


def problem(seed, count=6, most=4):
    chance = np.random.default_rng(seed)
    domains = [int(size) for size in chance.integers(1, most + 1, count)]
    factors = [((one,), chance.random(domains[one])) for one in range(count)]
    for pair in itertools.combinations(range(count), 2):
        if chance.random() < 0.6:
            table = chance.random([domains[one] for one in pair])
            factors.append((pair, np.where(chance.random(table.shape) < 0.1, np.inf, table)))
    return domains, factors


def total(factors, values):
    return sum(float(table[tuple(values[one] for one in variables)]) for variables, table in factors)


@pytest.mark.parametrize("largest", [10**7, 30, 8])
@pytest.mark.parametrize("seed", range(25))
def test_the_minimum_is_that_of_all_choices(seed, largest, monkeypatch):
    monkeypatch.setattr(elimination, "_LARGEST", largest)
    domains, factors = problem(seed)
    best = min(total(factors, values) for values in itertools.product(*map(range, domains)))
    found = minimize(domains, factors)
    assert found.total == pytest.approx(total(factors, found.values))
    if found.exact:
        assert found.total == pytest.approx(best)
    else:
        assert largest < 10**7
        assert found.total >= best - 1e-12


def test_values_that_are_never_better_do_not_make_a_problem_too_large(monkeypatch):
    monkeypatch.setattr(elimination, "_LARGEST", 10)
    domains, factors = problem(3)
    clear = [((one,), np.arange(size) * 100.0) for one, size in enumerate(domains)]
    found = minimize(domains, [*factors[: len(domains)], *clear])
    assert found.exact
    assert found.values == [0] * len(domains)
