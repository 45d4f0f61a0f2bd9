"""Free sizes: numbers of a third call from those of two."""

from __future__ import annotations

import pytest

from gemini.planner.free_sizes import FreeSizes, apply_rules

TEXT = ((8, 64), (8, 64), (8, 10))  # tokens, mask, targets
SHORTER = ((8, 48), (8, 48), (8, 12))


def made() -> FreeSizes:
    found = FreeSizes.between(TEXT, SHORTER, (0, 0, 0))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("first", "second", "third"),
    [
        ((7, 7), (7, 7), (7, 7)),
        ((64, 256), (48, 256), (56, 256)),
        ((4 * 64, 10), (4 * 48, 12), (4 * 56, 20)),
        ((64 * 64, 3), (48 * 48, 3), (56 * 56, 3)),
        ((5 * 64 * 10,), (5 * 48 * 12,), (5 * 56 * 20,)),
        ((64 - 1, 10 + 2), (48 - 1, 12 + 2), (56 - 1, 20 + 2)),
        ((3 * 64 + 5,), (3 * 48 + 5,), (3 * 56 + 5,)),
    ],
)
def test_a_shape_follows_the_sizes_of_the_call(
    first: tuple[int, ...], second: tuple[int, ...], third: tuple[int, ...]
) -> None:
    free = made()
    values = free.values(((4, 56), (4, 56), (4, 20)), (0, 0, 0))
    rules = free.shape_rules(first, second)
    assert values is not None
    assert rules is not None
    assert apply_rules(rules, values) == third


def test_a_number_without_a_rule() -> None:
    assert made().rule(65, 50) is None
    assert made().shape_rules((64,), (48, 1)) is None


def test_equal_sizes_stay_equal_and_others_stay_fixed() -> None:
    free = made()
    assert free.values(((8, 56), (8, 40), (8, 20)), (0, 0, 0)) is None
    assert free.values(((8, 1), (8, 1), (8, 20)), (0, 0, 0)) is None  # torch treats one entry in another way
    fixed = FreeSizes.between(((8, 64, 3),), ((8, 48, 3),), (0,))
    assert fixed is not None
    assert fixed.values(((8, 56, 4),), (0,)) is None


def test_calls_that_differ_in_samples_alone_have_no_free_size() -> None:
    assert FreeSizes.between(((8, 64),), ((6, 64),), (0,)) is None
