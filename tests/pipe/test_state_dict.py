"""State dicts use the original names, whatever the partition."""

from __future__ import annotations

import io

import pytest
import torch
from safetensors.torch import load_model, save_model
from torch import nn

from tests.pipe.models import CASES, make


@pytest.mark.parametrize("name", CASES)
def test_the_stages_together_are_the_model(pipe, name):
    model, args, kwargs = make(name)
    piped = pipe(model, args, kwargs, nparts=3)
    for names in ("named_parameters", "named_buffers"):
        held = dict(getattr(model, names)(remove_duplicate=False))
        union = {n: t for stage in piped.stages for n, t in getattr(stage, names)(remove_duplicate=False)}
        assert union.keys() == held.keys()
        assert all(union[n] is held[n] for n in held)
        assert [n for n, _ in getattr(piped, names)()] == [n for n, _ in getattr(model, names)()]
    union = {n: t for stage in piped.stages for n, t in stage.state_dict().items()}
    expected = model.state_dict()
    assert union.keys() == expected.keys()
    assert list(piped.state_dict()) == list(expected)
    assert all(torch.equal(union[n], expected[n]) and torch.equal(piped.state_dict()[n], expected[n]) for n in expected)


@pytest.mark.parametrize("name", ["bert", "t5", "unet", "held"])
def test_a_checkpoint_moves_both_ways_and_between_partitions(pipe, name):
    model, args, kwargs = make(name)
    four = pipe(model, args, kwargs, nparts=4)
    file = io.BytesIO()
    torch.save(four.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    plain, *_ = make(name, seed=1)
    plain.load_state_dict(saved)
    other, *_ = make(name, seed=2)
    two = pipe(other, args, kwargs, nparts=2, partitioner="acyclic")
    two.load_state_dict(saved)
    for key, value in model.state_dict().items():
        assert torch.equal(plain.state_dict()[key], value)
        assert torch.equal(two.state_dict()[key], value)
        for stage in two.stages:
            assert key not in stage.state_dict() or torch.equal(stage.state_dict()[key], value)
    back, *_ = make(name, seed=3)
    three = pipe(back, args, kwargs, nparts=3)
    three.load_state_dict(plain.state_dict())
    assert all(torch.equal(value, saved[key]) for key, value in three.state_dict().items())


def test_tied_parameters_are_saved_as_the_model_saves_them(pipe, tmp_path):
    model, args, kwargs = make("t5")
    piped = pipe(model, args, kwargs, nparts=4)
    save_model(piped.model, str(tmp_path / "tied.safetensors"))
    fresh, *_ = make("t5", seed=5)
    again = pipe(fresh, args, kwargs, nparts=2)
    load_model(again.model, str(tmp_path / "tied.safetensors"))
    assert torch.equal(again.model.head.weight, model.shared.weight)
    assert again.model.head.weight is again.model.shared.weight
    assert again.check(args, kwargs).is_right


def test_a_state_that_does_not_fit_is_refused_as_the_model_refuses_it(pipe):
    model, args, kwargs = make("sequential")
    piped = pipe(model, args, kwargs, nparts=2)
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight"):
        piped.load_state_dict({})
    told = piped.load_state_dict({}, strict=False)
    assert len(told.missing_keys) == 8


def test_assigned_and_replaced_parameters_are_picked_up(pipe):
    model, args, kwargs = make("held")
    piped = pipe(model, args, kwargs, nparts=3)
    other, *_ = make("held", seed=4)
    other.scale.data += 1
    piped.load_state_dict(other.state_dict(), assign=True)
    assert any(p is model.scale for stage in piped.stages for p in stage.parameters())
    assert piped.check(args, kwargs).is_right
    model.scale = nn.Parameter(torch.full((8,), 3.0))
    model.register_buffer("steps", torch.tensor(41))
    report = piped.check(args, kwargs)
    assert report.is_right, str(report)
    piped(*args)
    assert model.steps == 42
    assert piped.fallbacks == 0


def test_modes_of_parts_are_kept(pipe):
    """A part that stays in evaluation mode while the rest trains."""
    model, args, kwargs = make("unet")
    model.down[0].eval()
    piped = pipe(model, args, kwargs, nparts=3)
    assert not model.down[0][1].training
    assert piped.check(args, kwargs).is_right
    piped.train()
    assert model.down[0][1].training
    assert all(module.training for stage in piped.stages for module in stage.modules())
    piped.eval()
    assert not any(module.training for stage in piped.stages for module in stage.modules())


def test_gradients_are_cleared(pipe):
    model, args, kwargs = make("sequential")
    piped = pipe(model, args, kwargs, nparts=2)
    piped(*args).sum().backward()
    assert all(p.grad is not None for p in piped.parameters())
    piped.zero_grad()
    assert all(p.grad is None for p in piped.parameters())
