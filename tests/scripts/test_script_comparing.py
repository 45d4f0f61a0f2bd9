"""The comparison of runs sees what differs, and forgives what rounds."""

from __future__ import annotations

import torch

from gemini.report.journal import DISPATCHED, LOCAL, OVERLAPPED, Story
from tests.scripts import comparing
from tests.scripts.judging import path_of
from tests.scripts.registry import FLOAT32


def test_numbers_with_a_point_are_numbers_and_the_rest_is_text() -> None:
    text = "step 3  loss 0.123456 lr 1.00e-03 shape (3, 4)"
    assert [number.value for number in comparing.numbers(text)] == [0.123456, 0.001]
    assert comparing.template(text) == "step 3 loss # lr # shape (3, 4)"
    assert comparing.template("step 4") != comparing.template("step 3")


def test_the_last_digit_may_differ() -> None:
    assert comparing.printed("loss 0.123456", "loss 0.123457") == [0.0]
    assert comparing.printed("loss 1.234567", "loss 1.234667")[0] > FLOAT32
    assert comparing.printed("loss nan", "loss nan") == [0.0]


def test_noise_never_shrinks_again() -> None:
    assert comparing.grown([0.0, 2.0, 1.0, 3.0]) == [0.0, 2.0, 2.0, 3.0]


def test_checkpoints_are_compared_leaf_by_leaf() -> None:
    one = dict(comparing.tensors({"model": {"w": torch.ones(3)}, "steps": 4, "rest": [torch.arange(2)]}))
    assert set(one) == {"model.w", "steps", "rest[0]"}
    faults, deviations = comparing.saved(one, {**one, "model.w": torch.tensor([1.0, 1.0, 1.5])})
    assert not faults
    assert deviations == {"model.w": 0.5}
    assert comparing.saved(one, {**one, "model.w": torch.ones(4)})[0]
    assert comparing.saved(one, {**one, "steps": 5})[0]
    assert comparing.saved(one, {name: value for name, value in one.items() if name != "steps"})[0]
    assert comparing.saved(one, {**one, "rest[0]": torch.tensor([1, 1])})[0]


def test_the_path_is_the_fastest_one_taken() -> None:
    story = Story("Net", 2, steps={OVERLAPPED: 5, DISPATCHED: 1}, reasons={"the first call of its size shows …": 1})
    assert path_of([story], "")[:2] == (OVERLAPPED, "")
    slow = Story("Net", 2, steps={DISPATCHED: 3}, reasons={"batch normalization": 2, "the first call …": 1})
    assert path_of([slow], "")[:2] == (DISPATCHED, "batch normalization")
    assert path_of([], "gemini: too small")[:2] == (LOCAL, "too small")
