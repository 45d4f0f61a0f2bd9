"""A comparison has one row per partitioner; a failing one shows its reason."""

from __future__ import annotations

import json
from functools import cache

import pytest
import torch

from gemini.capture import capture
from gemini.errors import PartitionError
from gemini.partition import Options, Worker, compare
from gemini.partition import registry as registered
from gemini.partition.registry import partitioners
from gemini.profiling import profile
from tests.profiling.models import CASES


@cache
def profiled():
    torch.manual_seed(0)
    model, args, kwargs = CASES["tied"]()
    graph = capture(model, args, kwargs)
    return graph, profile(graph, args, kwargs, analytic="cpu")


def test_all_partitioners_side_by_side():
    found = compare(*profiled(), 2)
    assert {row.name for row in found} == {*partitioners(), "equal-layers"}
    assert found["equal-layers"].partition.partitioner == "equal-layers"
    for row in found:
        assert row.analysis is not None or row.reason
    balances = [row.analysis.balance for row in found if row.analysis is not None]
    assert balances == sorted(balances)
    assert found.best.analysis.speedup == max(row.analysis.speedup for row in found if row.analysis)
    text = found.table()
    assert all(row.name in text for row in found)
    assert {row["partitioner"] for row in json.loads(json.dumps(found.to_json()))["rows"]} == {r.name for r in found}


def test_a_failure_is_a_row_with_its_reason(monkeypatch):
    def refuses(problem):
        raise PartitionError("it is Sunday\n    → try on Monday")

    def breaks(problem):
        raise ZeroDivisionError("by zero")

    for name, function in (("refuses", refuses), ("breaks", breaks)):
        monkeypatch.setitem(registered.BUILT_IN, name, f"{__name__}:{name}")
        monkeypatch.setattr(__import__(__name__, fromlist=["_"]), name, function, raising=False)
    found = compare(*profiled(), 2)
    assert found["refuses"].reason.startswith("it is Sunday")
    assert found["breaks"].reason == "ZeroDivisionError: by zero"
    assert found["acyclic"].analysis is not None
    assert "failed: refuses: it is Sunday" in found.table()
    assert [row.analysis is None for row in found] == sorted(row.analysis is None for row in found)


def test_too_many_parts_fail_for_all_without_an_error():
    found = compare(*profiled(), 500)
    assert found.best is None
    assert all("500" in row.reason for row in found)
    assert "is the most" in found.table()


def test_some_partitioners_only_and_wrong_names():
    told = []
    found = compare(*profiled(), 2, ["acyclic", "exact"], progress=lambda *args: told.append(args))
    assert {row.name for row in found} == {"acyclic", "exact"}
    assert [entry[2] for entry in told] == ["acyclic", "exact"]
    with pytest.raises(PartitionError, match="did you mean 'exact'"):
        compare(*profiled(), 2, ["exat"])


def test_options_reach_all():
    options = Options(workers=(Worker(2.0), Worker(1.0)), micro_batches=4, schedule="gpipe")
    for row in compare(*profiled(), 2, options=options):
        if row.analysis is not None:
            assert row.analysis.micro_batches == 4
            assert [worker.speed for worker in row.analysis.workers] == [2.0, 1.0]
