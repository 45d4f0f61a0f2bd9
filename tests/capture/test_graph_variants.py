"""A call that takes another branch of the model's Python never runs the wrong graph."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from conformance.zoo.classics import CLASSICS
from gemini.capture import capture
from gemini.capture.graph_guards import early_guards


def same(graph, model, *args, seed=0, **kwargs):
    """Whether graph and model agree on a call, from the same generator state."""
    torch.manual_seed(seed)
    expected = model(*args, **kwargs)
    torch.manual_seed(seed)
    found = graph.run(*args, **kwargs)
    flat = torch.utils._pytree.tree_leaves
    return all(torch.equal(a, b) for a, b in zip(flat(expected), flat(found)) if isinstance(a, torch.Tensor))


def test_a_mask_test_is_a_guard():
    model, args, kwargs = CLASSICS["mask_test"]()
    graph = capture(model, args, kwargs)
    assert any(guard.data for guard in graph.guards)
    mask = kwargs["mask"].clone()
    mask[0, 3:] = False
    assert same(graph, model, *args, mask=mask)
    assert graph.variants.captured == 1
    assert same(graph, model, *args, **kwargs)
    assert same(graph, model, *args, mask=~mask)
    assert graph.variants.captured == 1
    assert graph.variants.eager == 0


def test_layer_drop_follows_the_generator():
    model, args, kwargs = CLASSICS["layer_drop"]()
    graph = capture(model, args, kwargs)
    for seed in range(40):
        assert same(graph, model, *args, seed=seed, **kwargs), seed
    assert 1 <= graph.variants.captured <= 15  # 4 layers: at most 16 ways


def test_beyond_the_limit_the_model_itself_runs():
    model, args, kwargs = CLASSICS["layer_drop"]()
    graph = capture(model, args, kwargs)
    graph.variants.limit = 2
    for seed in range(30):
        assert same(graph, model, *args, seed=seed, **kwargs), seed
    assert graph.variants.eager > 0
    assert len(graph.variants.graphs) <= 2


# Not resnet with one sample: BatchNorm of one value a channel is degenerate.
@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, size)
        for name in ("tied_language_model", "rotary_language_model", "vision_transformer", "lstm", "resnet")
        for size in (1, 2, 3, 5, 9)
        if (name, size) != ("resnet", 1)
    ],
)
def test_any_batch_size(name, size):
    model, args, _ = CLASSICS[name]()
    graph = capture(model, args)
    shape = (size, *args[0].shape[1:])
    batch = torch.randint(0, 40, shape) if args[0].dtype == torch.long else torch.randn(shape)
    assert same(graph, model, batch)
    assert graph.variants.captured == 0


def test_another_length_captures_again():
    model, args, _ = CLASSICS["unrolled_cell"]()
    graph = capture(model, args)
    assert same(graph, model, torch.randn(4, 7, 4))
    assert same(graph, model, torch.randn(2, 3, 4))
    assert graph.variants.captured == 2


def test_training_flag_gradient_mode_and_attributes_are_guarded():
    model, args, kwargs = CLASSICS["layer_drop"]()
    graph = capture(model, args, kwargs)
    model.eval()
    assert same(graph, model, *args, **kwargs)
    model.train()
    model.rate = 0.0
    assert same(graph, model, *args, **kwargs)
    with torch.no_grad():
        assert not graph.run(*args, **kwargs).requires_grad
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert graph.run(*args, **kwargs).dtype == model(*args, **kwargs).dtype


def test_a_container_that_grows_is_noticed():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    graph = capture(model, (x,))
    model.append(nn.Linear(4, 2))
    assert graph.run(x).shape == (3, 2)


def test_changed_weights_and_replaced_leaves_are_used():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(3, 4)
    graph = capture(model, (x,))
    with torch.no_grad():
        model[0].weight.zero_()
    assert same(graph, model, x)
    model[1] = nn.Linear(4, 7)
    assert same(graph, model, x)


def test_arguments_by_position_by_name_and_in_any_order():
    model, args, kwargs = CLASSICS["optional_and_none"]()
    graph = capture(model, args, kwargs)
    x = args[0]
    assert same(graph, model, x=x, **kwargs)
    assert same(graph, model, x, **dict(reversed(kwargs.items())))
    assert graph.variants.captured == 0
    assert same(graph, model, x, torch.ones(8), **kwargs)
    assert same(graph, model, x, **{**kwargs, "mode": "relu"})
    assert graph.variants.captured == 2


def test_inputs_that_were_one_tensor_may_later_be_several():
    model, args, _ = CLASSICS["same_tensor_twice"]()
    graph = capture(model, args)
    assert same(graph, model, *(torch.randn(4, 8, requires_grad=True) for _ in range(3)))


def test_a_broken_guard_undoes_what_ran_before_it():
    class Late(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x, flag):
            x = self.norm(x) + torch.rand(())
            if flag.any():
                x = -x
            return self.linear(F.dropout(x))

    model = Late().train()
    x, off, on = torch.randn(6, 8), torch.zeros(6), torch.ones(6)
    graph = capture(model, (x, off))
    for flag in (on, off, on):
        before = {key: value.clone() for key, value in model.state_dict().items()}
        torch.manual_seed(1)
        expected = model(x, flag)
        after = {key: value.clone() for key, value in model.state_dict().items()}
        state = torch.get_rng_state()
        model.load_state_dict(before)
        torch.manual_seed(1)
        assert torch.equal(expected, graph.run(x, flag))
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in after.items())
        assert torch.equal(state, torch.get_rng_state())


def test_the_models_own_error_reaches_the_caller():
    model, args, kwargs = CLASSICS["mlp"]()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        capture(model, (torch.randn(4, 3),))
    graph = capture(model, args, kwargs)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        graph.run(torch.randn(4, 3))
    with pytest.raises(TypeError):
        graph.run()


def test_guards_on_inputs_are_known_before_the_run():
    model, args, kwargs = CLASSICS["mask_test"]()
    graph = capture(model, args, kwargs)
    bound = {"x": args[0], **kwargs}
    assert early_guards(graph).find_broken(model, bound) is None
    bound["mask"] = torch.zeros_like(kwargs["mask"])
    broken = early_guards(graph).find_broken(model, bound)
    assert broken is not None
    assert "classics_flow.py" in broken.line
    model, args, kwargs = CLASSICS["layer_drop"]()
    assert early_guards(capture(model, args, kwargs)).guards == []  # random: only known when they are drawn
