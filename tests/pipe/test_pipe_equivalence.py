"""The stages equal the model in outputs, gradients and buffers, run in sequence and detached."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from gemini.partition import Options
from gemini.partition.registry import BUILT_IN
from gemini.pipe.detached_step import copy_tensor
from gemini.pipe.stage_check import objective
from tests.pipe.models import CASES, T5, Bert, make


@pytest.mark.parametrize("nparts", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_stages_equal_the_model(pipe, name, nparts):
    model, args, kwargs = make(name)
    piped = pipe(model, args, kwargs, nparts=nparts)
    assert len(piped.stages) == nparts
    report = piped.check(args, kwargs)
    assert report.is_right, str(report)
    assert report.is_exact or report.rounding


@pytest.mark.parametrize("partitioner", BUILT_IN)
@pytest.mark.parametrize("name", ["t5", "unet"])
def test_every_partitioner(pipe, name, partitioner):
    if partitioner == "metis":
        pytest.importorskip("pymetis")
    model, args, kwargs = make(name)
    piped = pipe(model, args, kwargs, nparts=3, partitioner=partitioner, options=Options())
    report = piped.check(args, kwargs)
    assert report.is_right, str(report)


@pytest.mark.parametrize("name", ["bert", "t5", "unet", "integers", "experts"])
def test_another_batch_size(pipe, name):
    model, args, kwargs = make(name)
    piped = pipe(model, args, kwargs, nparts=3)

    def larger(value):
        return torch.cat([value, value.flip(0)]) if isinstance(value, torch.Tensor) else value

    args, kwargs = tuple(map(larger, args)), {key: larger(value) for key, value in kwargs.items()}
    report = piped.check(args, kwargs)
    assert report.is_right, str(report)


@pytest.mark.parametrize("make_optimizer", [lambda p: torch.optim.SGD(p, 0.01, momentum=0.9), torch.optim.AdamW])
@pytest.mark.parametrize("detached", [False, True])
@pytest.mark.parametrize("name", ["bert", "t5", "unet", "held"])
def test_three_steps_of_training(pipe, name, detached, make_optimizer):
    """The same seed, the same weights after each step; dropout is on."""
    model, args, kwargs = make(name)
    reference = copy.deepcopy(model)
    piped = pipe(model, args, kwargs, nparts=3)

    def train(trained, step):
        torch.manual_seed(7)
        optimizer = make_optimizer(trained.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            step()
            optimizer.step()

    train(reference, lambda: objective(reference(*args, **kwargs)).backward())
    if detached:
        train(piped, lambda: piped.run_detached(args, kwargs, loss=objective))
    else:
        train(piped, lambda: objective(piped(*args, **kwargs)).backward())
    assert piped.fallbacks == 0
    for (key, value), (other, expected) in zip(piped.state_dict().items(), reference.state_dict().items(), strict=True):
        assert key == other
        # Stages may run branches in another order: gradients of shared weights are then summed in another order.
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6, msg=key)


def test_the_output_has_the_model_s_own_classes(pipe):
    model, args, kwargs = make("nested")
    piped = pipe(model, args, kwargs, nparts=4)
    for found in (piped(*args, **kwargs), piped.run_detached(args, kwargs).output):
        expected = model(*args, **kwargs)
        assert type(found) is type(expected)
        assert list(found.parts) == list(expected.parts)
        assert found.name == "done"
        assert found.parts["none"] is None
        assert found.parts["size"] == 4
        assert found.parts["same"] is args[0]["pixels"]
        assert not found.parts["best"].is_floating_point()


def test_the_loss_is_found_in_the_output(pipe):
    model, args, kwargs = make("nested")
    piped = pipe(model, args, kwargs, nparts=2)
    step = piped.run_detached(args, kwargs)
    assert torch.equal(step.loss, model(*args, **kwargs).loss)


def test_without_a_loss_the_detached_run_says_what_to_do(pipe):
    from gemini.errors import GenerateError

    model, args, kwargs = make("sequential")
    piped = pipe(model, args, kwargs, nparts=2)
    with pytest.raises(GenerateError, match="loss="):
        piped.run_detached(args, kwargs)
    assert piped.run_detached(args, kwargs, loss=lambda _: None).loss is None


# ── gradients ──────────────────────────────────────────────────────────────────────────────────────────────────────
def test_gradients_are_added_to_those_there_are(pipe):
    model, args, kwargs = make("t5")
    reference = copy.deepcopy(model).eval()
    model.eval()
    piped = pipe(model, args, kwargs, nparts=4)
    for _ in range(2):
        reference(*args, **kwargs)[0].backward()
        piped.run_detached(args, kwargs)
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-5, atol=1e-6, msg=name)


def test_a_hook_on_a_tied_parameter_sees_the_sum_once(pipe):
    model, args, kwargs = make("t5")
    seen, late = [], []
    model.shared.weight.register_hook(lambda grad: seen.append(grad.clone()) or grad * 2)
    model.shared.weight.register_post_accumulate_grad_hook(lambda p: late.append(p.grad.clone()))
    model.eval()
    piped = pipe(model, args, kwargs, nparts=4)
    assert len(piped.stages) == 4
    seen.clear()
    late.clear()
    model(*args, **kwargs)[0].backward()
    expected = model.shared.weight.grad.clone()
    model.zero_grad()
    piped.run_detached(args, kwargs)
    torch.testing.assert_close(model.shared.weight.grad, expected)
    assert len(seen) == len(late) == 2
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(*late)


def test_gradients_flow_on_into_what_made_the_input(pipe):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    before = nn.Linear(8, 8)
    x = torch.randn(4, 8)
    piped = pipe(model, (before(x),), nparts=3)
    model(before(x)).square().sum().backward()
    expected = before.weight.grad.clone()
    before.zero_grad()
    model.zero_grad()
    piped.run_detached((before(x),), loss=lambda y: y.square().sum())
    assert torch.equal(before.weight.grad, expected)


class Writes(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x.mul_(2)
        y = x
        for layer in self.layers:
            y = layer(y)
        return y


@pytest.mark.parametrize("detached", [False, True])
def test_writes_into_an_argument_reach_the_caller(pipe, detached):
    model, x = Writes(), torch.randn(4, 8)
    piped = pipe(model, (x.clone(),), nparts=2)
    given = x.clone()
    if detached:
        piped.run_detached((given,), loss=lambda y: y.sum())
    else:
        piped(given)
    assert torch.equal(given, x * 2)
    assert piped.fallbacks == 0


def test_writes_into_an_argument_reach_the_caller_in_inference_mode(pipe):
    with torch.inference_mode():
        model, x = Writes(), torch.randn(4, 8)
        piped = pipe(model, (x.clone(),), nparts=2)
        given = x.clone()
        piped.run_detached((given,), loss=lambda _: None)
        assert torch.equal(given, x * 2)
    assert piped.fallbacks == 0


def test_no_parameter_is_copied(pipe):
    model, args, kwargs = make("bert")
    piped = pipe(model, args, kwargs, nparts=4)
    own = {id(p) for p in model.parameters()}
    assert {id(p) for stage in piped.stages for p in stage.parameters()} == own


# ── copies ─────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    "change",
    [
        lambda x: x,
        lambda x: x.transpose(0, 2),
        lambda x: x[:, ::2, 1:],
        lambda x: x[:1].expand(5, -1, -1),
        lambda x: x.unfold(1, 2, 1),
        lambda x: x[0, 0, 0],
        lambda x: x[:0],
        lambda x: x > 0,
        lambda x: (x * 10).long().t() if x.dim() == 2 else (x * 10).long(),
    ],
)
def test_a_copy_has_the_same_strides_and_its_own_memory(change):
    value = change(torch.randn(2, 4, 6))
    made = copy_tensor(value)
    assert torch.equal(made, value)
    assert made.stride() == value.stride()
    if value.numel():
        assert made.data_ptr() != value.data_ptr()


def test_models_of_different_depth_share_nothing(pipe):
    """Two partitioned models at once, as in a game of two."""
    torch.manual_seed(0)
    one, other = Bert(3).eval(), T5(2).eval()
    ids = torch.randint(0, 20, (4, 6))
    first, second = pipe(one, (ids,), nparts=2), pipe(other, (ids, ids), nparts=3)
    assert torch.equal(first(ids)["logits"], one(ids)["logits"])
    assert torch.equal(second(ids, ids)[0], other(ids, ids)[0])
