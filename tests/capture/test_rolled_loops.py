"""Loops over samples are rolled only where the batch's trace repeats that of a micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from gemini.capture import Graph, capture
from gemini.capture.batch_dim import BatchLayout
from gemini.capture.options import CaptureOptions
from gemini.capture.sample_indices import is_shifted
from gemini.capture.specialize import accepts_call
from gemini.ir.pytree import Literal, Ref, SequenceForm, SliceForm

D = 6
Body = Callable[["Looping", torch.Tensor], torch.Tensor]
LOOPS: dict[str, Body] = {}
OTHERS: dict[str, Body] = {}


def loop(body: Body) -> Body:
    LOOPS[body.__name__] = body
    return body


def other(body: Body) -> Body:
    OTHERS[body.__name__] = body
    return body


class Looping(nn.Module):
    """Something between two layers."""

    def __init__(self, body: Body) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, 3)
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self, self.first(x)))


def rolled(body: Body, few: int = 2, times: int = 3) -> Graph:
    torch.manual_seed(0)
    model = Looping(body).double()
    options = CaptureOptions(BatchLayout((0,), few), times)
    return capture(model, (torch.randn(few, D, dtype=torch.float64),), options=options)


# ── alike ──────────────────────────────────────────────────────────────────────────────────────────────────────────
@loop
def stacked(model, x):
    return torch.stack([torch.tanh(model.inner(one)) for one in x])


@loop
def by_number(model, x):
    return torch.stack([torch.tanh(model.inner(x[i])) for i in range(x.shape[0])])


@loop
def by_slice(model, x):
    return torch.cat([model.inner(x[i : i + 1]).softmax(1) for i in range(len(x))])


@loop
def by_subscript(model, x):
    return torch.stack([torch.cat([x[i, 3:], x[i, :3]]) for i in range(len(x))])


@loop
def split(model, x):
    return torch.cat([q * q.sum() for q in torch.split(x, [1] * len(x))])


@loop
def written(model, x):
    out = torch.empty(x.shape[0], D, dtype=x.dtype)
    for i in range(x.shape[0]):
        out[i, :2] = model.inner(x[i])[4:]
        out[i, 2:] = 1.0
    return out


@loop
def written_by_a_mask(model, x):
    out, mask = torch.zeros(2, x.shape[0], D, dtype=x.dtype), x[:, :1] < 100
    for i in range(x.shape[0]):
        out[:, i, mask[i].expand(D)] = model.inner(x[i])
    return out.sum(0)


@loop
def tables(model, x):
    return x + torch.cat([torch.arange(D).flip(0)[None] for _ in range(len(x))])


@loop
def masks_of_their_own(model, x):
    found = []
    for one in x:
        mask = torch.zeros(D, dtype=x.dtype)
        mask[: D // 2] = 1
        found.append(one * mask)
    return torch.stack(found)


@loop
def two_loops(model, x):
    first = [torch.tanh(one) for one in x]
    second = [model.inner(one) for one in torch.stack(first)]
    return torch.stack([a + b for a, b in zip(first, second, strict=True)])


# ── not alike ──────────────────────────────────────────────────────────────────────────────────────────────────────
@other
def carried(model, x):
    found, state = [], torch.zeros(D, dtype=x.dtype)
    for one in x:
        state = torch.tanh(model.inner(one) + state)
        found.append(state)
    return torch.stack(found)


@other
def previous(model, x):
    parts = list(x)
    return torch.stack([model.inner(one) + parts[i - 1] for i, one in enumerate(parts)])


@other
def backwards(model, x):
    return torch.stack([model.inner(one) for one in reversed(list(x))])


@other
def numbered(model, x):
    return torch.stack([model.inner(one) * (i + 1) for i, one in enumerate(x)])


@other
def summed(model, x):
    total = torch.zeros(D, dtype=x.dtype)
    for one in x:
        total = total + model.inner(one)
    return x + total


@other
def joined_twice(model, x):
    parts = [model.inner(one) for one in x]
    return torch.stack(parts) + torch.stack(parts[::-1])


@other
def drawn(model, x):
    return torch.stack([torch.dropout(model.inner(one), 0.5, True) for one in x])


@other
def all_but_the_fourth(model, x):
    return torch.stack([one if i == 3 else model.inner(one) for i, one in enumerate(x)])


@other
def read_while_written(model, x):
    out, seen = torch.zeros(x.shape[0], D, dtype=x.dtype), []
    for i in range(x.shape[0]):
        out[i] = model.inner(x[i])
        seen.append(out.sum(0))
    return out + torch.stack(seen)


@other
def a_parameter_each(model, x):
    rows = [model.inner.weight, model.first.weight, model.inner.weight, model.first.weight, *[model.inner.weight] * 9]
    return torch.stack([one + row[0] for one, row in zip(x, rows, strict=False)])


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(("few", "times"), [(1, 4), (2, 3)])
def test_loops_are_those_of_the_micro_batch_over_and_over(name: str, few: int, times: int) -> None:
    graph = rolled(LOOPS[name], few, times)
    assert graph.rolled == times, graph.checked
    assert any(node.role for node in graph.nodes)
    x = torch.randn(few * times, D, dtype=torch.float64)
    expected = graph.bound_model()(x)
    parts = torch.cat([graph.execute((part,)) for part in x.split(few)])
    torch.testing.assert_close(parts, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(("few", "times"), [(1, 4), (2, 3)])
def test_what_is_done_otherwise_with_another_sample_is_no_such_loop(name: str, few: int, times: int) -> None:
    graph = rolled(OTHERS[name], few, times)
    assert not graph.rolled, [node for node in graph.nodes if node.role]
    assert graph.batch_size is None


def test_one_element_for_all_is_no_copy() -> None:
    def first_for_all(model, x):
        parts = list(x)
        with_first = torch.tanh(parts[0])
        return torch.stack([one + with_first for one in parts])

    graph = rolled(first_for_all, 1, 4)
    tanh = next(node for node in graph.nodes if node.target.endswith("tanh"))
    assert not graph.rolled or tanh.role == ""


def test_a_rolled_graph_runs_on_its_own_size_only() -> None:
    graph = rolled(LOOPS["tables"])
    for samples in (1, 3, 6):
        assert not accepts_call(graph, {"x": torch.randn(samples, D, dtype=torch.float64)})
    assert accepts_call(graph, {"x": torch.randn(2, D, dtype=torch.float64)})


def test_roles_are_stored(tmp_path: Path) -> None:
    graph = rolled(LOOPS["written"])
    graph.save(tmp_path / "graph.json")
    again = Graph.load(tmp_path / "graph.json", graph.model)
    assert (again.rolled, again.pins) == (graph.rolled, graph.pins)
    assert [node.role for node in again.nodes] == [node.role for node in graph.nodes]


def test_what_branches_read_is_pinned() -> None:
    class Lengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(D, D)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            parts = torch.split(self.inner(x), lengths.tolist())
            return torch.cat([part.softmax(0) for part in parts])

    options = CaptureOptions(BatchLayout((0, 0), 1, (3, 1)), 4)
    graph = capture(Lengths(), (torch.randn(3, D), torch.tensor([3])), options=options)
    assert graph.rolled == 4, graph.checked
    assert [graph.nodes[index].target for index in graph.pins] == ["lengths"]


def _subscripts() -> Iterator[tuple[object, object, int, bool]]:
    whole = SliceForm(Literal(None), Literal(None), Literal(None))
    yield Literal(0), Literal(3), 1, True
    yield Literal(2), Literal(8), 2, True
    yield Literal(3), Literal(6), 1, False  # not among the first micro-batch's
    yield Literal(0), Literal(4), 1, False
    yield Literal(-1), Literal(2), 1, False
    rows = SliceForm(Literal(0), Literal(3), Literal(None))
    yield rows, SliceForm(Literal(3), Literal(6), Literal(None)), 1, True
    yield rows, SliceForm(Literal(3), Literal(7), Literal(None)), 1, False
    yield SliceForm(Literal(1), Literal(4), Literal(None)), SliceForm(Literal(4), Literal(7), Literal(None)), 1, False
    yield (
        SliceForm(Literal(0), Literal(None), Literal(None)),
        SliceForm(Literal(3), Literal(None), Literal(None)),
        1,
        False,
    )
    yield SequenceForm(tuple, (Literal(1), whole)), SequenceForm(tuple, (Literal(4), whole)), 1, True
    yield SequenceForm(tuple, (Literal(None), Literal(1))), SequenceForm(tuple, (Literal(None), Literal(4))), 1, True
    yield (
        SequenceForm(tuple, (whole, Literal(1))),
        SequenceForm(tuple, (whole, Literal(4))),
        1,
        False,
    )  # another dimension
    yield SequenceForm(tuple, (Literal(...), Literal(1))), SequenceForm(tuple, (Literal(...), Literal(4))), 1, False
    yield Literal(True), Literal(True), 1, False
    mask = Ref(7)
    yield SequenceForm(tuple, (Literal(1), mask)), SequenceForm(tuple, (Literal(4), mask)), 1, True
    yield (
        SequenceForm(tuple, (mask, Literal(1))),
        SequenceForm(tuple, (mask, Literal(4))),
        1,
        False,
    )  # of which dimension?
    yield (
        SequenceForm(tuple, (Literal(...), Literal(1), mask)),
        SequenceForm(tuple, (Literal(...), Literal(4), mask)),
        1,
        False,
    )


@pytest.mark.parametrize(("one", "later", "times", "expected"), list(_subscripts()))
def test_subscripts_of_later_micro_batches(one: object, later: object, times: int, expected: bool) -> None:
    assert is_shifted(one, later, (0, 2, 3), times) is expected
