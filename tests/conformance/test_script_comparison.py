"""The comparison of script runs detects differences and tolerates rounding."""

from __future__ import annotations

import pytest
import torch

from conformance.scripts import comparison as comparing
from conformance.scripts import last_bits, strictness
from conformance.scripts.registry import FLOAT32
from conformance.scripts.verdict import path_of
from gemini.runtime.call_outcome import CallPath
from gemini.runtime.run_journal import ModelJournal


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
    story = ModelJournal(
        "Net", 2, steps={CallPath.OVERLAPPED: 5, CallPath.EAGER: 1}, reasons={"the first call of its size shows …": 1}
    )
    assert path_of([story], "")[:2] == (CallPath.OVERLAPPED, "")
    slow = ModelJournal(
        "Net",
        2,
        steps={CallPath.EAGER: 3},
        reasons={"eager dispatch: batch normalization": 2, "local: the first call …": 1},
    )
    assert path_of([slow], "")[:2] == (CallPath.EAGER, "batch normalization")
    assert path_of([], "gemini: too small")[:2] == (CallPath.LOCAL, "too small")


def _printed(ours: str, threads: str = "loss 1.000000", bits: str = "loss 1.000000") -> str:
    return strictness.printed("loss 1.000000", ours, lambda: threads, [lambda: "loss 1.000000", lambda: bits])[0]


def test_the_strictest_limit_that_is_met_is_told() -> None:
    assert _printed("loss 1.000000") == strictness.EQUAL
    assert _printed("loss 1.000009", threads="loss 1.000001") == strictness.THREADS
    assert _printed("loss 1.000009", bits="loss 1.000001") == strictness.BITS
    assert _printed("loss 1.000001") == strictness.DIGIT
    assert _printed("loss 1.000011", threads="loss 1.000001") == strictness.BEYOND


def test_the_weakest_limit_of_all_numbers_counts_and_noise_of_earlier_ones() -> None:
    theirs, ours = "a 1.0000 b 2.0000 c 3.0000", "a 1.0009 b 2.0009 c 3.0000"
    assert strictness.printed(theirs, ours, lambda: "a 1.0001 b 2.0000 c 3.0000", [lambda: theirs])[0] == "threads"
    assert strictness.printed(theirs, ours, lambda: "a 1.0000 b 2.0001 c 3.0000", [lambda: theirs])[0] == "beyond"


def test_saved_tensors_are_held_to_the_noise_of_the_same_tensor() -> None:
    off = {"w": 1e-6, "b": 0.0}
    assert strictness.saved({"w": 0.0}, dict, [])[0] == strictness.EQUAL
    assert strictness.saved(off, lambda: {"w": 1e-7}, [])[0] == strictness.THREADS
    assert strictness.saved(off, lambda: {"w": 0.0}, [dict, lambda: {"w": 2e-7}])[0] == strictness.BITS
    assert strictness.saved(off, lambda: {"b": 1.0}, [lambda: {"b": 1.0}])[0] == strictness.BEYOND


def test_every_number_moves_to_its_neighbour() -> None:
    weights = torch.randn(64)
    moved = weights.clone()
    last_bits.move(moved)
    assert (moved != weights).all()
    assert torch.isclose(moved, weights, rtol=2e-7, atol=0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_move_to_their_neighbours_in_the_type_they_are_computed_in(dtype: torch.dtype) -> None:
    weight = torch.ones(64, requires_grad=True)
    (last_bits.Rounding.apply(weight, dtype) * 3).sum().backward()
    assert weight.grad is not None
    apart = ((weight.grad - 3) / 3).abs()
    assert (apart > 0).all()
    assert (apart <= torch.finfo(dtype).eps).all()
