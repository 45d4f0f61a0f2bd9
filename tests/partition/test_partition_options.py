"""Options are validated on construction, with all faults at once, and round-trip through JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemini.errors import PartitionError
from gemini.partition.partition_options import Options, Worker
from gemini.schedule.link_costs import Links


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"weight": "all"}, "weight 'all'; expected one of both, forward, backward"),
        ({"tied": "yes"}, "tied 'yes'; expected one of together, sync"),
        ({"slack": -0.1}, "slack -0.1; expected a finite number, 0 or more"),
        ({"slack": "much"}, "slack 'much'"),
        ({"ratio": float("nan")}, "ratio nan"),
        ({"chunks": 0}, "chunks 0; expected an integer, 1 or more"),
        ({"micro_batches": 2.5}, "micro_batches 2.5"),
        ({"micro_batches": True}, "micro_batches True"),
        ({"mixed": False, "chunks": 2}, "2 chunks per worker contradict one stage per worker"),
        ({"workers": (Worker(0.0),)}, "worker 0 has speed 0.0; expected a number above 0"),
        ({"workers": (Worker(1.0, -3.0),)}, "worker 0 has -3.0 MB of memory"),
        ({"workers": (1.0, 2.0)}, "expected Worker("),
        ({"pins": {"encoder": -1}}, "'encoder' is pinned to part -1"),
        ({"pins": {"encoder": "first"}}, "'encoder' is pinned to part 'first'"),
        ({"pins": ["encoder"]}, "pins ['encoder']; expected a dict"),
        ({"uncut": "encoder"}, "uncut 'encoder'; expected a tuple of scopes"),
        ({"together": ("encoder", "decoder")}, "together ('encoder', 'decoder'); expected a tuple of groups"),
        ({"links": 3}, "links 3; expected Links"),
    ],
)
def test_a_wrong_option_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(PartitionError) as caught:
        Options(**wrong)
    assert said in str(caught.value)


def test_all_faults_are_told_at_once() -> None:
    with pytest.raises(PartitionError) as caught:
        Options(weight="all", slack=-1, chunks=0)
    assert str(caught.value).count("\n  - ") == 3


def test_options_survive_json() -> None:
    options = Options(
        workers=(Worker(1.0, 100.0), Worker(2.0)),
        links=Links(((0, 1), (1, 0)), 5.0),
        together=(("a", "b"), ("c",)),
        pins={"a": 1},
        uncut=("d",),
        slack=0.1,
    )
    assert Options.from_json(json.loads(json.dumps(options.to_json()))) == options


@pytest.mark.parametrize("data", [{"sluck": 1}, {"workers": [{"power": 1}]}, {"links": {"width": 1}}, {"workers": 3}])
def test_json_of_something_else_is_refused(data: dict[str, Any]) -> None:
    with pytest.raises(PartitionError):
        Options.from_json(data)


def test_unknown_options_list_the_known_ones() -> None:
    with pytest.raises(PartitionError, match=r"unknown options: sluck\n    → known are action_ms, chunks, .*slack"):
        Options.from_json({"sluck": 1})


def test_one_worker_a_part() -> None:
    assert Options().workers_for(3) == (Worker(),) * 3
    with pytest.raises(PartitionError, match="2 workers are described for 3 parts"):
        Options(workers=(Worker(), Worker())).workers_for(3)
