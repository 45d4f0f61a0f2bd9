"""A call that the stages do not cover runs the model itself, with one warning per reason."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from tests.pipe.models import make


def test_calls_that_fit_are_silent(pipe):
    model, args, kwargs = make("bert")
    piped = pipe(model, args, kwargs, nparts=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piped(*args, **kwargs)
        piped.run_detached(args, kwargs)
    assert piped.fallbacks == 0
    assert piped.fallback_reasons == {}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda m, a, k: (a, {}), r"argument labels is absent"),
        (lambda m, a, k: ((a[0][:, :4],), {key: v[:, :4] for key, v in k.items()}), r"argument ids is \(4, 4\) int64"),
        (lambda m, a, k: (a, {**k, "labels": k["labels"][:2]}), r"batch sizes"),
        (lambda m, a, k: (m.eval() and a, k), r"the model was changed: model: .*training.*False"),
        (
            lambda m, a, k: (m.layers[0].up.requires_grad_(False) and a, k),
            r"the model was changed: state: .*layers.0.up.* False",
        ),
        (lambda m, a, k: (m.double() and a, k), r"the model was changed: state: .*float64"),
    ],
)
def test_other_calls_run_the_model(pipe, change, reason):
    model, args, kwargs = make("bert")
    piped = pipe(model, args, kwargs, nparts=2)
    args, kwargs = change(model, args, kwargs)
    if "batch sizes" in reason:
        with pytest.raises(ValueError, match="batch_size"):  # the model's own words, without ours
            piped(*args, **kwargs)
        assert piped.fallbacks == 0
        return
    torch.manual_seed(3)
    expected = model(*args, **kwargs)
    torch.manual_seed(3)
    with pytest.warns(UserWarning, match=reason):
        found = piped(*args, **kwargs)
    assert torch.equal(found["logits"], expected["logits"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        piped(*args, **kwargs)
    assert piped.fallbacks == 2
    assert len(piped.fallback_reasons) == 1


def test_without_gradients(pipe):
    model, args, kwargs = make("unet")
    piped = pipe(model, args, kwargs, nparts=2)
    with torch.no_grad(), pytest.warns(UserWarning, match="gradients off; the stages were generated with gradients on"):
        assert not piped(*args).requires_grad


def test_stages_of_an_evaluated_model_without_gradients(pipe):
    """They are made for the mode they were asked for in."""
    model, args, kwargs = make("unet")
    model.eval()
    with torch.no_grad():
        piped = pipe(model, args, kwargs, nparts=2)
        assert torch.equal(piped(*args), model(*args))
        assert piped.check(args, kwargs).is_exact
    assert piped.fallbacks == 0


def test_a_detached_step_that_does_not_fit_is_taken_with_the_model(pipe):
    model, args, kwargs = make("bert")
    model.eval()
    piped = pipe(model, args, kwargs, nparts=2)
    short = {key: value[:, :3] for key, value in kwargs.items()}
    with pytest.warns(UserWarning, match="argument ids"):
        step = piped.run_detached((args[0][:, :3],), short)
    found = model.head.weight.grad.clone()
    model.zero_grad()
    loss = model(args[0][:, :3], **short)["loss"]
    loss.backward()
    assert torch.equal(step.loss, loss)
    assert torch.equal(found, model.head.weight.grad)


class LayerDrop(nn.Module):
    """Leaves a layer out by chance, after dropout has drawn and statistics have changed."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.norm, self.dropout = nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x):
        y = self.norm(self.dropout(self.first(x)))
        if torch.rand(()) < 0.5:
            y = self.second(y)
        return self.third(y)


@pytest.mark.parametrize("detached", [False, True])
def test_a_guard_that_breaks_in_mid_run_leaves_no_trace(pipe, detached):
    torch.manual_seed(0)
    model, x = LayerDrop().train(), torch.randn(6, 8)
    piped = pipe(model, (x,), nparts=2)

    def step(seed, run):
        torch.manual_seed(seed)
        model.norm.reset_running_stats()
        model.zero_grad()
        output = run()
        state = {key: value.clone() for key, value in model.state_dict().items()}
        grads = {name: p.grad for name, p in model.named_parameters()}
        return [output.detach(), torch.rand(3), state, grads]

    def eager():
        output = model(x)
        output.sum().backward()
        return output

    def staged():
        if detached:
            return piped.run_detached((x,), loss=lambda y: y.sum()).output
        output = piped(x)
        output.sum().backward()
        return output

    def compare_all():
        for seed in range(8):
            torch.testing.assert_close(step(seed, staged), step(seed, eager), rtol=0, atol=0)

    with pytest.warns(UserWarning, match="takes another branch"):
        compare_all()
    assert 0 < piped.fallbacks < 8


def test_the_model_s_own_error_is_unchanged(pipe):
    model, args, kwargs = make("bert")
    piped = pipe(model, args, kwargs, nparts=2)
    wrong = torch.full_like(args[0], 99)  # a word that is not in the vocabulary
    with pytest.raises(IndexError) as expected:
        model(wrong, **kwargs)
    with pytest.raises(IndexError) as found:
        piped(wrong, **kwargs)
    assert str(found.value) == str(expected.value)
    assert found.value.__context__ is None
    assert piped.fallbacks == 0
    with pytest.raises(TypeError, match="unexpected keyword"):
        piped(*args, colour="red")


# ── hooks ──────────────────────────────────────────────────────────────────────────────────────────────────────────
def test_hooks_on_the_model_run_around_the_stages(pipe):
    model, args, kwargs = make("sequential")
    seen = []
    model.register_forward_pre_hook(lambda m, given: seen.append("before") or (given[0] * 2,))
    model.register_forward_hook(lambda m, given, output: seen.append("after") or output + 1)
    piped = pipe(model, args, kwargs, nparts=2)
    expected = model(*args)
    seen.clear()
    assert torch.equal(piped(*args), expected)
    assert seen == ["before", "after"]
    piped.run_detached(args, loss=lambda y: y.sum())
    assert seen == ["before", "after"] * 2
    assert piped.fallbacks == 0


def test_a_hook_on_a_layer_runs_in_its_stage(pipe):
    model, args, kwargs = make("sequential")
    piped = pipe(model, args, kwargs, nparts=2)
    seen = []
    model[2].register_forward_hook(lambda m, given, output: seen.append(m))
    piped(*args)
    assert seen == [model[2]]


def test_a_hook_added_to_a_part_that_is_cut_is_not_lost(pipe):
    model, args, kwargs = make("bert")
    piped = pipe(model, args, kwargs, nparts=2)
    seen = []
    handle = model.layers[1].register_forward_hook(lambda m, given, output: seen.append(m))
    with pytest.warns(UserWarning, match="hooks"):
        piped(*args, **kwargs)
    assert seen == [model.layers[1]]
    handle.remove()
    piped(*args, **kwargs)
    assert piped.fallbacks == 1


def test_a_traceback_shows_the_generated_line(pipe):
    import traceback

    model, args, kwargs = make("sequential")
    piped = pipe(model, args, kwargs, nparts=2)
    try:
        piped.stages[1](torch.randn(4, 3))
    except RuntimeError as error:
        shown = "".join(traceback.format_exception(error))
    assert "stage_1.py" in shown
    lines = piped.sources["stage_1.py"].splitlines()
    frame = next(f for f in traceback.extract_tb(error_traceback(piped)) if f.filename.endswith("stage_1.py"))
    assert frame.line == lines[frame.lineno - 1].strip()


def error_traceback(piped):
    try:
        piped.stages[1](torch.randn(4, 3))
    except RuntimeError as error:
        return error.__traceback__
    raise AssertionError


def test_the_source_of_a_live_stage_can_be_inspected(pipe):
    import inspect

    model, args, kwargs = make("sequential")
    piped = pipe(model, args, kwargs, nparts=2)
    assert inspect.getsource(type(piped.stages[0])) in piped.sources["stage_0.py"]
