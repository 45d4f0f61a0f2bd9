"""The cache: what was measured is not measured again, and nothing doubtful is believed."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.profiling import profile
from gemini.profiling.cache import Cache
from gemini.profiling.measurement import Measurement, Memory
from gemini.profiling.robust import Reading
from gemini.profiling.work import Kernel, Work
from tests.profiling.models import Tied, tokens


@pytest.fixture
def graph():
    torch.manual_seed(0)
    return capture(Tied(2), (tokens(),))


def costs(found):
    return [(cost.forward_ms, cost.backward_ms, cost.saved_mb, cost.flops, cost.saved_values) for cost in found]


def test_a_second_profile_comes_from_the_cache(graph, tmp_path):
    first = profile(graph, (tokens(),), cache=tmp_path, rounds=1)
    again = profile(graph, (tokens(),), cache=tmp_path, rounds=1)
    assert costs(first) == costs(again)
    classes = len({cost.node_class for cost in first})
    assert again.notes == (f"{classes} of {classes} classes from the cache",)
    assert len(list(tmp_path.iterdir())) == classes
    assert again.check is not None  # the step is measured each time, so an old profile shows


def test_a_deeper_model_of_the_same_layers_is_known_already(graph, tmp_path):
    profile(graph, cache=tmp_path, rounds=1, check=False)
    deeper = profile(capture(Tied(3), (tokens(),)), cache=tmp_path, rounds=1, check=False)
    assert deeper.notes
    known, _, total = deeper.notes[0].partition(" of ")
    assert int(known) == int(total.split()[0])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: "",
        lambda data: "[]",
        lambda data: json.dumps(data)[:-20],
        lambda data: json.dumps({**data, "key": "another node"}),
        lambda data: json.dumps({**data, "measurement": {**data["measurement"], "forward": {"ms": -1}}}),
        lambda data: json.dumps({**data, "measurement": {**data["measurement"], "forward": {"ms": float("nan")}}}),
        lambda data: json.dumps({**data, "measurement": {**data["measurement"], "source": "dreamt"}}),
        lambda data: json.dumps({**data, "measurement": None}),
        lambda data: "[" * 100_000,
    ],
)
def test_spoiled_entries_are_measured_again(graph, tmp_path, spoil):
    first = profile(graph, cache=tmp_path, rounds=1, check=False)
    for path in tmp_path.iterdir():
        path.write_text(spoil(json.loads(path.read_text())))
    again = profile(graph, cache=tmp_path, rounds=1, check=False)
    assert again.notes == ()
    assert all(cost.source == "measured" for cost in again)
    third = profile(graph, cache=tmp_path, rounds=1, check=False)
    assert costs(third) == costs(again)
    assert len(first) == len(third)


def test_other_devices_versions_and_nodes_are_other_entries(tmp_path):
    found = Measurement(*[Reading(1.0)] * 4, Memory(aliases=(-1,)), Work((Kernel("float32", True, 1, 2),)), Work())
    Cache(tmp_path, "one").write("node", found)
    assert Cache(tmp_path, "one").read("node") == found
    assert Cache(tmp_path, "two").read("node") is None
    assert Cache(tmp_path, "one").read("another") is None
    assert Cache(None, "one").read("node") is None


class Scaled(nn.Module):
    def forward(self, x):
        return x * 2


def test_changed_code_is_another_entry(tmp_path, monkeypatch):
    from gemini.profiling import signature

    model = nn.Sequential(nn.Linear(4, 4), Scaled())
    profile(capture(model, (torch.ones(2, 4),)), cache=tmp_path, rounds=1, check=False)
    monkeypatch.setattr(Scaled, "forward", lambda self, x: (x * 2).exp().log())
    signature._CODES.clear()
    again = profile(capture(model, (torch.ones(2, 4),)), cache=tmp_path, rounds=1, check=False)
    assert again.notes == ("1 of 2 classes from the cache",)


def test_a_folder_that_cannot_be_written_is_no_error(graph, tmp_path):
    (tmp_path / "file").write_text("")
    found = profile(graph, cache=tmp_path / "file", rounds=1, check=False)
    assert found.notes == ()


def test_no_cache_writes_nothing(graph, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    profile(graph, cache=False, rounds=1, check=False)
    assert list(tmp_path.iterdir()) == []
    profile(graph, rounds=1, check=False)
    assert list((tmp_path / "gemini" / "profiles").glob("*.json"))
