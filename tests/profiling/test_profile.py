"""Profiles of small models are complete, consistent, and have no side effects."""

from __future__ import annotations

import copy
import dataclasses
import json
import random

import numpy as np
import pytest
import torch

from gemini.capture import capture
from gemini.errors import ArtifactError, ProfileError
from gemini.profiling import Profile, profile
from gemini.profiling.cpu_device import CpuDevice
from tests.profiling.models import CASES, Tied, tokens

MB = 1 << 20


def made(name):
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    return model, args, kwargs, capture(model, args, kwargs)


@pytest.fixture(scope="module")
def tied():
    model, args, kwargs, graph = made("tied")
    return model, graph, profile(graph, args, kwargs, cache=False)


@pytest.mark.parametrize("name", CASES)
def test_every_node_that_computes_is_measured(name):
    model, args, kwargs, graph = made(name)
    found = profile(graph, args, kwargs, cache=False, rounds=1)
    assert [cost.id for cost in found] == [node.id for node in graph.compute_nodes]
    assert [(cost.name, cost.reason) for cost in found if cost.source != "measured"] == []
    assert all(cost.samples >= 1 and cost.forward_ms > 0 for cost in found)
    held = {p.data_ptr(): p.numel() * p.element_size() for p in (*model.parameters(), *model.buffers())}
    assert found.parameter_mb() <= sum(held.values()) / MB + 1e-9
    assert found.check is not None
    assert found.check.step_ms > 0
    assert found.check.sum_ms == pytest.approx(found.forward_ms + found.backward_ms)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("analytic", [None, "h100"])
def test_profiling_changes_nothing_observable(name, analytic):
    model, args, kwargs, graph = made(name)
    for index, parameter in enumerate(model.parameters()):
        if index % 2 and parameter.requires_grad:
            parameter.grad = torch.full_like(parameter, index)
    grads = [(p.grad, None if p.grad is None else p.grad.clone()) for p in model.parameters()]
    before = copy.deepcopy(model.state_dict())
    identities = {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    flags = {name: module.training for name, module in model.named_modules()}
    inputs = [tensor.clone() for tensor in (*args, *kwargs.values())]
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()

    profile(graph, args, kwargs, cache=False, rounds=1, analytic=analytic)

    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert identities == {n: id(t) for n, t in (*model.named_parameters(), *model.named_buffers())}
    assert flags == {name: module.training for name, module in model.named_modules()}
    for parameter, (grad, contents) in zip(model.parameters(), grads, strict=True):
        assert parameter.grad is grad
        assert grad is None or torch.equal(grad, contents)
    assert all(torch.equal(a, b) for a, b in zip((*args, *kwargs.values()), inputs, strict=True))
    assert all(tensor.grad is None for tensor in args)


def test_parameters_add_up_to_the_models_and_tied_ones_count_once(tied):
    model, _, found = tied
    assert found.parameter_mb() == pytest.approx(sum(p.numel() * 4 for p in model.parameters()) / MB)
    shared = found["embed"].parameter_mb
    assert shared == found["head"].parameter_mb == pytest.approx(50 * 16 * 4 / MB)
    assert found.parameter_mb([found["embed"], found["head"]]) == pytest.approx(shared)


def test_equal_nodes_are_one_class_with_one_cost(tied):
    _, _, found = tied
    for name in ("norm", "up", "down", "dropout"):
        costs = [found[f"layers.{index}.{name}"] for index in range(4)]
        assert len({cost.node_class for cost in costs}) == 1
        assert {cost.pooled for cost in costs} == {4}
        assert len({(cost.forward_ms, cost.backward_ms, cost.saved_own_mb) for cost in costs}) == 1
    assert found["layers.0.up"].node_class != found["layers.0.down"].node_class
    assert len({cost.node_class for cost in found}) < len(found) / 2


def test_sizes_follow_from_the_shapes(tied):
    _, _, found = tied
    hidden, wide = 4 * 6 * 16 * 4 / MB, 4 * 6 * 64 * 4 / MB
    up = found["layers.0.up"]
    assert (up.input_mb, up.output_mb) == pytest.approx((hidden, wide))
    assert up.parameter_mb == pytest.approx((16 * 64 + 64) * 4 / MB)
    assert up.saved_mb == pytest.approx(hidden)  # a linear layer keeps its input, and its weight is no activation
    assert up.saved_own_mb == 0
    assert up.forward_peak_mb >= wide * 0.99
    assert up.backward_peak_mb >= hidden + up.parameter_mb - 1e-9  # gradients of input, weight and bias
    assert up.flops == pytest.approx(3 * 2 * 24 * 16 * 64, rel=0.1)


def test_values_kept_by_several_nodes_count_once(tied):
    _, _, found = tied
    layer = [cost for cost in found if cost.name.startswith("layers.0.")]
    assert found.saved_mb(layer) < sum(cost.saved_mb for cost in layer)
    assert found.saved_mb(layer) >= max(cost.saved_mb for cost in layer)
    assert found.saved_mb() <= sum(cost.saved_mb for cost in found)


def test_saved_memory_is_what_autograd_keeps_for_the_whole_model():
    """The union over nodes equals the saved storages of one eager forward."""
    model, args, kwargs, graph = made("tied")
    found = profile(graph, args, kwargs, cache=False, rounds=1, check=False)
    kept: dict[int, int] = {}
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in held:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*args, **kwargs)
    assert found.saved_mb() == pytest.approx(sum(kept.values()) / MB, rel=0.02)
    del output


def test_recomputation_trades_memory_for_time(tied):
    _, _, found = tied
    again = found.with_recomputation()
    for cost, other in zip(found, again, strict=True):
        if cost.backward_ms:
            assert other.backward_ms == pytest.approx(cost.forward_ms + cost.backward_ms)
            assert other.saved_mb == pytest.approx(cost.input_mb)
        else:
            assert other == cost
        assert other.with_recomputation() == other
    assert again.check is None


def test_depth_and_basic_blocks_decide_the_granularity():
    model, args, kwargs = CASES["tied"]()
    fine = profile(capture(model, args, kwargs), args, kwargs, cache=False, rounds=1)
    coarse = profile(capture(model, args, kwargs, basic_blocks=("Layer",)), args, kwargs, cache=False, rounds=1)
    assert len(coarse) < len(fine)
    assert {coarse[f"layers.{index}"].pooled for index in range(4)} == {4}
    assert coarse.parameter_mb() == pytest.approx(fine.parameter_mb())
    # One value fewer is a value of the graph and one more inside a block; what is kept stays the same.
    assert coarse.saved_mb() == pytest.approx(fine.saved_mb(), rel=0.02)


def test_without_a_batch_one_is_made_up():
    *_, graph = made("tied")
    found = profile(graph, cache=False, rounds=1)
    assert found.check is not None
    assert all(cost.source == "measured" for cost in found)


def test_where_the_made_up_batch_is_wrong_a_real_one_is_asked_for():
    model = torch.nn.EmbeddingBag(10, 4)
    args = torch.tensor([1, 2, 3, 4]), torch.tensor([0, 2])
    graph = capture(torch.nn.ModuleDict({"bag": model})["bag"], args)
    assert profile(graph, args, cache=False, rounds=1).check is not None
    with pytest.raises(ProfileError, match=r"→ pass a batch that the model accepts"):
        profile(graph, cache=False, rounds=1)


def test_only_the_loss_is_differentiated(tied):
    _, _, found = tied
    assert found["cross_entropy"].backward_ms > 0
    assert found["flatten#2"].backward_ms == 0


def test_regions_without_gradients_have_no_backward():
    *_, graph = made("odd")
    found = profile(graph, cache=False, rounds=1)
    assert found["inside"].backward_ms == 0
    assert found["inside"].saved_mb == 0
    assert found["outside"].backward_ms > 0


def test_a_batch_that_does_not_fit_names_every_fault():
    _, _, _, graph = made("tied")
    with pytest.raises(ProfileError) as caught:
        profile(graph, (tokens()[:, :3],), {"labels": tokens().float()})
    text = str(caught.value)
    assert "ids is int64[4, 3], the graph was captured with int64[4, 6]" in text
    assert "labels is float32[4, 6]" in text
    assert "→ capture the model with this batch" in text


@pytest.mark.parametrize("name", ["cuda:99", "tpu", "mps", "nonsense device", ""])
def test_a_device_that_is_not_there_lists_those_that_are(name):
    _, _, _, graph = made("no loss")
    with pytest.raises(ProfileError, match="devices present: cpu"):
        profile(graph, device=name)


@pytest.mark.parametrize("rounds", [0, -3, 1.5, "two", None])
def test_rounds_are_whole_numbers(rounds):
    *_, graph = made("no loss")
    with pytest.raises(ProfileError, match="1 or more"):
        profile(graph, rounds=rounds)


def test_an_unknown_clock_lists_the_known():
    with pytest.raises(ProfileError, match="wall, cpu"):
        CpuDevice(clock="sun")


def test_json_round_trip(tied, tmp_path):
    _, _, found = tied
    assert Profile.from_json(json.loads(json.dumps(found.to_json()))) == found
    found.save(tmp_path / "profile.json")
    assert Profile.load(tmp_path / "profile.json") == found


def test_files_that_are_no_profiles(tied, tmp_path):
    _, _, found = tied
    data = found.to_json()
    for wrong in (
        {},
        [],
        {"format": 99},
        {**data, "nodes": [{}]},
        {**data, "mode": "guessed"},
        {**data, "values_mb": None},
    ):
        with pytest.raises(ProfileError):
            Profile.from_json(wrong)
    with pytest.raises(ArtifactError, match="cannot be read"):
        Profile.load(tmp_path / "missing.json")
    (tmp_path / "text.json").write_text("no json")
    with pytest.raises(ArtifactError, match="not JSON"):
        Profile.load(tmp_path / "text.json")


def test_a_wrong_profile_tells_all_faults(tied):
    _, _, found = tied
    first, second, *rest = found.nodes
    broken = (
        dataclasses.replace(first, forward_ms=-1.0),
        dataclasses.replace(second, saved_mb=float("nan"), parameters=("nobody",)),
        *rest,
    )
    with pytest.raises(ProfileError) as caught:
        dataclasses.replace(found, nodes=broken)
    for part in ("forward_ms is -1.0", "saved_mb is nan", "no size for parameter nobody"):
        assert part in str(caught.value)


def test_unknown_nodes_are_named(tied):
    with pytest.raises(ProfileError, match="no node 'nobody'"):
        tied[2]["nobody"]


def test_a_model_of_one_block_and_a_model_without_parameters():
    model = torch.nn.ReLU()
    found = profile(capture(torch.nn.Sequential(model), (torch.randn(3, 3),)), cache=False, rounds=1)
    assert found.parameter_mb() == 0
    assert all(cost.backward_ms == 0 for cost in found)


def test_progress_is_told():
    _, args, kwargs, graph = made("no loss")
    told = []
    profile(graph, args, kwargs, cache=False, progress=lambda done, total, what: told.append((done, total, what)))
    assert told[0][2] == "survey"
    assert told[-1] == (1, 1, "done")
    assert all(0 <= done <= total for done, total, _ in told)


def test_a_shared_parameter_is_summed_by_all_but_its_last_user():
    from gemini.profiling.gradient_flow import GradientFlow

    model, *_, graph = made("tied")
    flow = GradientFlow(graph)
    assert flow.shared[graph["embed"].id] == [model.embed.weight]
    assert flow.shared[graph["head"].id] == []


def test_gradients_flow_from_the_loss_and_count_readers():
    from gemini.ir.pytree import Ref
    from gemini.profiling.gradient_flow import GradientFlow

    *_, graph = made("tied")
    flow = GradientFlow(graph)
    assert flow.roots == [Ref(graph["cross_entropy"].id)]
    assert flow.readers(graph["embed"]) == (2,)  # the norm and the residual sum
    assert flow.readers(graph["head"]) == (1,)
    assert graph["flatten#2"].id not in flow.active


def test_every_node_of_a_class_is_read_in_every_pass():
    for layers in (3, 12):
        found = profile(capture(Tied(layers), (tokens(),)), (tokens(),), cache=False, rounds=2)
        passes = {cost.samples / cost.pooled for cost in found}
        assert len(passes) == 1
        assert passes.pop() >= 2
