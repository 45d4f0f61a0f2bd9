"""The figures of a partition analysis add up, agree with the solved problem, and survive serialization."""

from __future__ import annotations

import json
import math
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.errors import PartitionError
from gemini.partition import Analysis, Options, Partition, Worker, analyse, partition
from gemini.partition.analysis.stage_scopes import span_text, stage_scopes
from gemini.partition.partition_problem import in_flight
from gemini.partition.problem_builder import build_problem
from gemini.profiling import profile
from gemini.schedule.block import FORWARD
from gemini.schedule.library import LIBRARY
from gemini.schedule.link_costs import Links
from tests.profiling.models import CASES

MODELS = sorted(CASES)


@cache
def profiled(name):
    torch.manual_seed(0)
    model, args, kwargs = CASES[name]()
    graph = capture(model, args, kwargs)
    return graph, profile(graph, args, kwargs, analytic="cpu")


def in_pieces(graph, nparts, laps=1):
    """Neighbours in execution order, as many to each stage, stages round the workers."""
    nodes = [node.id for node in graph.compute_nodes]
    count = min(nparts * laps, len(nodes))
    edges = [round(at * len(nodes) / count) for at in range(count + 1)]
    stages = tuple(tuple(nodes[a:b]) for a, b in pairwise(edges))
    return Partition(graph.model_name, "pieces", nparts, stages, tuple(at % nparts for at in range(count)))


# ── the figures ────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("nparts", [1, 2, 3])
def test_nothing_is_lost_or_counted_twice(name, nparts):
    graph, costs = profiled(name)
    found = analyse(graph, costs, in_pieces(graph, nparts))
    assert sum(stage.forward_ms for stage in found.stages) == pytest.approx(costs.forward_ms)
    assert sum(stage.backward_ms for stage in found.stages) == pytest.approx(costs.backward_ms)
    assert sum(worker.load_ms for worker in found.workers) == pytest.approx(costs.forward_ms + costs.backward_ms)
    assert sorted(node for stage in found.stages for node in stage.nodes) == [n.id for n in graph.compute_nodes]
    assert sum(stage.in_mb for stage in found.stages) == pytest.approx(sum(stage.out_mb for stage in found.stages))
    returned = sum(stage.returned_mb for stage in found.stages)
    assert returned == pytest.approx(sum(stage.sent_back_mb for stage in found.stages))
    assert found.balance >= 1 - 1e-9
    assert 0 <= found.bubble < 1
    assert found.step_ms >= max(worker.load_ms for worker in found.workers) * (1 - 1e-6)
    assert found.single_ms == pytest.approx(costs.forward_ms + costs.backward_ms)


@pytest.mark.parametrize("name", ["tied", "images", "transformer", "odd"])
@pytest.mark.parametrize(
    "options",
    [
        Options(),
        Options(workers=(Worker(1.0), Worker(2.0))),
        Options(links=Links(0.01, 1e6), micro_batches=4),
        Options(ratio=1.5, recompute=True),
        Options(weight="forward"),
    ],
    ids=["plain", "unequal", "links", "recompute", "forward"],
)
def test_it_agrees_with_the_problem_that_partitioners_solve(name, options):
    graph, costs = profiled(name)
    made = partition(graph, costs, 2, "acyclic", options)
    problem = build_problem(graph, costs, 2, options)
    found = analyse(graph, costs, made, options)
    part_of = [made.workers[made.stage_of[item.nodes[0]]] for item in problem.items]
    if all(stage.depth for stage in found.stages):
        assert found.balance == pytest.approx(problem.bottleneck(part_of))
        assert found.cut_mb == pytest.approx(problem.cut_mb(part_of))
    else:  # readers without a backward send no gradient
        assert found.balance <= problem.bottleneck(part_of) * (1 + 1e-9)
        assert found.cut_mb <= problem.cut_mb(part_of)
    assert found.ideal_ms == pytest.approx(problem.ideal_ms)
    for at, stage in enumerate(found.stages):
        items = [place for place, item in enumerate(problem.items) if made.stage_of[item.nodes[0]] == at]
        depth = in_flight(at, len(found.stages), options.micro_batches)
        if stage.depth == depth:  # not so where a stage has no backward
            assert stage.memory.total_mb == pytest.approx(problem.memory_mb(items, depth))


@pytest.mark.parametrize("name", MODELS)
def test_json_and_files(name, tmp_path):
    graph, costs = profiled(name)
    found = analyse(graph, costs, in_pieces(graph, 2, laps=2))
    again = Analysis.from_json(json.loads(json.dumps(found.to_json())))
    assert again == found
    assert (again.balance, again.speedup, again.bubble) == (found.balance, found.speedup, found.bubble)
    found.save(tmp_path / "analysis.json")
    assert Analysis.load(tmp_path / "analysis.json") == found
    assert again.table() == found.table()


@pytest.mark.parametrize("data", [None, [], {}, {"format": 9}, {"format": 1}, {"format": 1, "stages": [{}]}])
def test_other_json_is_refused(data):
    with pytest.raises(PartitionError, match="analyse the partition again"):
        Analysis.from_json(data)


# ── schedules ──────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize("schedule", [*LIBRARY, "composed", "interleaved", "zero_bubble"])
@pytest.mark.parametrize("laps", [1, 2])
def test_every_schedule_is_predicted_or_replaced_with_a_note(schedule, laps):
    graph, costs = profiled("tied")
    found = analyse(graph, costs, in_pieces(graph, 2, laps), Options(schedule=schedule, micro_batches=8))
    asked = {"interleaved": "interleaved_1f1b", "zero_bubble": "zb_h1"}.get(schedule, schedule)
    replaced = [note for note in found.notes if "1f1b is shown" in note]
    assert found.schedule == ("1f1b" if replaced else asked)
    assert bool(replaced) == (asked not in ADMITTED[laps])
    assert 1 / 2 <= found.speedup <= 2


ADMITTED = {
    1: {"gpipe", "1f1b", "zb_h1", "zb_h2", "composed"},
    2: {"gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zb", "composed"},
}


def test_v_shaped_stages_run_v_shaped_schedules():
    graph, costs = profiled("tied")
    pieces = in_pieces(graph, 2, 2)
    v_shaped = Partition(pieces.model, "v", 2, pieces.stages, (0, 1, 1, 0))
    found = analyse(graph, costs, v_shaped, Options(schedule="zb_v"))
    assert found.schedule == "zb_v"
    assert not [note for note in found.notes if "is shown" in note]


def test_workers_may_come_in_any_order():
    graph, costs = profiled("tied")
    pieces = in_pieces(graph, 3)
    turned = Partition(pieces.model, "turned", 3, pieces.stages, (2, 0, 1))
    for schedule in ("1f1b", "zb_h1", "gpipe", "composed"):
        options = Options(schedule=schedule)
        assert analyse(graph, costs, turned, options).schedule == schedule
        assert analyse(graph, costs, turned, options).step_ms == pytest.approx(
            analyse(graph, costs, pieces, options).step_ms
        )


def test_an_unknown_schedule_lists_those_that_exist():
    graph, costs = profiled("tied")
    with pytest.raises(PartitionError, match="did you mean '1f1b'"):
        analyse(graph, costs, in_pieces(graph, 2), Options(schedule="1f1"))


def test_gpipe_holds_all_micro_batches_and_1f1b_as_many_as_stages_follow():
    graph, costs = profiled("transformer")
    pieces = in_pieces(graph, 3)
    deep = analyse(graph, costs, pieces, Options(schedule="gpipe", micro_batches=6))
    flat = analyse(graph, costs, pieces, Options(schedule="1f1b", micro_batches=6))
    assert [stage.depth for stage in deep.stages] == [6, 6, 6]
    assert [stage.depth for stage in flat.stages] == [3, 2, 1]
    for held, less in zip(deep.stages, flat.stages):
        assert held.memory.activations_mb * less.depth == pytest.approx(less.memory.activations_mb * held.depth)


def test_composed_keeps_to_the_memory_that_weights_leave():
    graph, costs = profiled("transformer")
    pieces = in_pieces(graph, 2)
    least = analyse(graph, costs, pieces, Options(micro_batches=8, schedule="1f1b"))
    tight = tuple(Worker(memory_mb=worker.memory.total_mb) for worker in least.workers)
    found = analyse(graph, costs, pieces, Options(micro_batches=8, schedule="composed", workers=tight))
    assert found.fits
    none = (Worker(memory_mb=0.001), Worker())
    over = analyse(graph, costs, pieces, Options(micro_batches=8, schedule="composed", workers=none))
    assert not over.fits
    assert any("no schedule fits the memory" in note for note in over.notes)
    assert "over its limit" in over.table()


# ── odd partitions ─────────────────────────────────────────────────────────────────────────────────────────────────
def test_a_worker_without_work():
    graph, costs = profiled("tied")
    pieces = in_pieces(graph, 2)
    found = analyse(graph, costs, Partition(pieces.model, "few", 3, pieces.stages, (2, 0)))
    assert [worker.stages for worker in found.workers] == [(1,), (), (0,)]
    assert found.workers[1].idle == 1
    assert found.workers[1].memory.total_mb == 0
    assert "none" in found.table()


def test_a_stage_that_learns_nothing_has_no_backward():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    graph = capture(model, (torch.randn(4, 8),))
    costs = profile(graph, (torch.randn(4, 8),), analytic="cpu")
    found = analyse(graph, costs, in_pieces(graph, 3))
    assert [stage.depth > 0 for stage in found.stages] == [False, True, True]
    assert found.stages[0].memory.gradients_mb == found.stages[0].memory.activations_mb == 0
    assert found.stages[0].returned_mb == 0
    for schedule in LIBRARY:
        assert analyse(graph, costs, in_pieces(graph, 3), Options(schedule=schedule)).step_ms > 0


def test_inference_has_no_backward_at_all():
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))).requires_grad_(False)
    graph = capture(model, (torch.randn(4, 8),))
    costs = profile(graph, (torch.randn(4, 8),), analytic="cpu")
    for schedule in ("1f1b", "gpipe", "zb_h1", "composed"):
        found = analyse(graph, costs, in_pieces(graph, 2), Options(schedule=schedule))
        assert all(stage.backward_ms == stage.depth == 0 for stage in found.stages)
        assert found.speedup > 1


def test_shared_weights_are_marked_and_counted_on_every_worker_that_has_them():
    graph, costs = profiled("tied")
    found = analyse(graph, costs, in_pieces(graph, 2))
    assert [stage.shared for stage in found.stages] == [("embed.weight",), ("embed.weight",)]
    assert any("gradients are summed: embed.weight" in note for note in found.notes)
    together = analyse(graph, costs, Partition("Tied", "same", 2, in_pieces(graph, 2).stages, (1, 1)))
    assert not any("summed" in note for note in together.notes)
    whole = analyse(graph, costs, in_pieces(graph, 1))
    assert together.workers[1].memory.weights_mb == pytest.approx(whole.workers[0].memory.weights_mb)
    assert sum(stage.parameters for stage in whole.stages) == sum(p.numel() for p in graph.model.parameters())


def test_a_value_is_sent_once_to_a_worker_and_not_at_all_to_its_own():
    class Skips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Linear(64, 64) for _ in range(4))

        def forward(self, x):
            a = self.a(x)
            return self.d(self.c(self.b(a) + a) + a)

    batch = torch.randn(16, 64)
    graph = capture(Skips(), (batch,))
    costs = profile(graph, (batch,), analytic="cpu")
    nodes = {node.name: node.id for node in graph.compute_nodes}
    names = [["a"], ["b", "add"], ["c", "add#2"], ["d"]]
    stages = tuple(tuple(sorted(nodes[name] for name in group)) for group in names)
    size = 16 * 64 * 4 / 2**20
    found = analyse(graph, costs, Partition("Skips", "hand", 2, stages, (0, 1, 1, 0)))
    by_ends = {(flow.source, flow.target): flow for flow in found.flows}
    assert by_ends[0, 1].forward_mb == by_ends[0, 1].backward_mb == size
    assert by_ends[0, 2].mb == 0  # it has that value already
    assert by_ends[1, 2].mb == 0  # the same worker
    assert by_ends[2, 3].mb == 2 * size
    assert found.cut_mb == 4 * size
    assert [stage.hops for stage in found.stages] == [0, 1, 1, 2]
    assert found.hops == 2


def test_unequal_workers_are_judged_against_the_fastest():
    graph, costs = profiled("transformer")
    pieces = in_pieces(graph, 2)
    found = analyse(graph, costs, pieces, Options(workers=(Worker(4.0), Worker(1.0))))
    plain = analyse(graph, costs, pieces)
    assert found.stages[0].forward_ms == pytest.approx(plain.stages[0].forward_ms / 4)
    assert found.single_ms == pytest.approx(plain.single_ms / 4)
    assert found.ideal_ms == pytest.approx(plain.single_ms / 5)


def test_recomputation_keeps_less_and_takes_longer():
    graph, costs = profiled("transformer")
    pieces = in_pieces(graph, 2)
    plain, again = (analyse(graph, costs, pieces, Options(recompute=flag)) for flag in (False, True))
    assert again.single_ms == pytest.approx(plain.single_ms + costs.forward_ms, rel=0.05)
    assert sum(s.memory.activations_mb for s in again.stages) < sum(s.memory.activations_mb for s in plain.stages)


def test_another_profile_judges_the_same_cut():
    graph, costs = profiled("tied")
    model, args, kwargs = CASES["tied"]()
    other = profile(capture(model, args, kwargs), args, kwargs, analytic="h100")
    made = partition(graph, costs, 2, "acyclic")
    found = analyse(graph, other, made)
    assert found.device != analyse(graph, costs, made).device
    assert sum(stage.forward_ms for stage in found.stages) == pytest.approx(other.forward_ms)


def test_what_does_not_fit_is_said():
    graph, costs = profiled("tied")
    other_graph, other_costs = profiled("images")
    pieces = in_pieces(graph, 2)
    with pytest.raises(PartitionError, match="does not match this graph"):
        analyse(graph, other_costs, pieces)
    with pytest.raises(PartitionError, match="does not fit the graph"):
        analyse(other_graph, other_costs, pieces)
    with pytest.raises(PartitionError, match="3 workers are described for 2 parts"):
        analyse(graph, costs, pieces, Options(workers=(Worker(),) * 3))


# ── words ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@pytest.mark.parametrize(
    ("first", "last", "text"),
    [
        ("a", "a", "a"),
        ("bert.encoder.layer.6", "bert.encoder.layer.11.attention", "bert.encoder.layer.6 … layer.11.attention"),
        ("bert.embeddings", "cls", "bert.embeddings … cls"),
        ("0", "3", "0 … 3"),
        ("layers.0", "layers.0.fc", "layers.0 … layers.0.fc"),
        ("a.b", "a.b.c", "a.b … b.c"),
    ],
)
def test_a_span_of_scopes(first, last, text):
    assert span_text(first, last) == text


def test_scopes_name_whole_modules():
    graph, costs = profiled("tied")
    found = analyse(graph, costs, Partition("Tied", "hand", 2, _split_at(graph, "layers.2.norm"), (0, 1)))
    assert found.stages[0].scopes == "embed … layers.1"
    assert found.stages[1].scopes.startswith("layers.2 … ")
    assert analyse(graph, costs, in_pieces(graph, 1)).stages[0].scopes == "the whole model"


def test_what_weighs_nothing_breaks_no_run_of_scopes():
    graph, _ = profiled("tied")
    nodes = [node.id for node in graph.compute_nodes]
    moved = graph["layers.1.relu_"].id
    first, second = _split_at(graph, "layers.3.norm")
    made = Partition("Tied", "hand", 2, (tuple(n for n in first if n != moved), (moved, *second)), (0, 1))
    light = {node: 0.001 if node == moved else 1.0 for node in nodes}
    assert stage_scopes(graph, made, light)[0] == "embed … layers.2"
    heavy = {node: 9.0 if node == moved else 1.0 for node in nodes}
    assert stage_scopes(graph, made, heavy)[0] == "embed … layers.1.up, layers.1.down … layers.2"


def _split_at(graph, name):
    nodes = [node.id for node in graph.compute_nodes]
    at = nodes.index(graph[name].id)
    return (tuple(nodes[:at]), tuple(nodes[at:]))


def test_the_table_says_it_all():
    graph, costs = profiled("tied")
    text = analyse(graph, costs, in_pieces(graph, 2)).table()
    for part in (
        "forward",
        "backward",
        "peak",
        "changes",
        "embed …",
        "balance 1.",
        "speed-up",
        "bubble",
        "1f1b with 8",
    ):
        assert part in text, text
    assert max(map(len, text.splitlines())) <= 160
    assert not math.isnan(analyse(graph, costs, in_pieces(graph, 2)).balance)


def test_narrow_terminals_get_scopes_below_the_figures(monkeypatch):
    graph, costs = profiled("tied")
    found = analyse(graph, costs, in_pieces(graph, 2))
    monkeypatch.setattr("gemini.partition.analysis.analysis_table._width", lambda: 104)
    text = found.table()
    assert max(map(len, text.splitlines())) <= 104
    assert all(stage.scopes in text for stage in found.stages)


class Drawing(nn.Module):
    """Its last draw depends on nothing but on the numbers that were drawn before."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        hidden = torch.dropout(self.first(x), 0.5, True)
        hidden = torch.dropout(self.second(hidden), 0.5, True)
        return hidden, torch.rand(8)


@pytest.mark.parametrize("schedule", ["composed", "1f1b", "gpipe"])
def test_stages_draw_in_the_order_of_the_model(schedule):
    inputs = (torch.randn(8, 8),)
    graph = capture(Drawing(), inputs)
    costs = profile(graph, inputs, {}, analytic="cpu")
    nodes = [node.id for node in graph.compute_nodes]
    assert len(nodes) == 5
    made = Partition("Drawing", "hand", 2, (tuple(nodes[:2]), tuple(nodes[2:4]), (nodes[4],)), (0, 1, 0))
    found = analyse(graph, costs, made, Options(schedule=schedule, micro_batches=1))
    assert [(flow.source, flow.target, flow.values) for flow in found.flows] == [(0, 1, 1), (1, 2, 0)]
    starts = {block.stage: found.plan.step(block) for block in found.plan if block.btype == FORWARD}
    assert starts[0] < starts[1] < starts[2]
