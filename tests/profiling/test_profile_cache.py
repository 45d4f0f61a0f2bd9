"""Cached measurements are reused; doubtful entries are measured again."""

from __future__ import annotations

import json
import multiprocessing

import pytest
import torch
from torch import nn

from gemini.capture import capture
from gemini.profiling import profile
from gemini.profiling.class_measurement import Measurement
from gemini.profiling.flop_count import KernelCounts, KernelWork
from gemini.profiling.node_memory import NodeMemory
from gemini.profiling.profile_cache import ProfileCache
from gemini.profiling.reading_statistics import Reading
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
    assert again.notes == (f"{classes} of {classes} classes read from the cache",)
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
    found = Measurement(
        *[Reading(1.0)] * 4,
        NodeMemory(aliases=(-1,)),
        KernelCounts((KernelWork("float32", True, 1, 2),)),
        KernelCounts(),
    )
    ProfileCache(tmp_path, "one").write("node", found)
    assert ProfileCache(tmp_path, "one").read("node") == found
    assert ProfileCache(tmp_path, "two").read("node") is None
    assert ProfileCache(tmp_path, "one").read("another") is None
    assert ProfileCache(None, "one").read("node") is None


class Scaled(nn.Module):
    def forward(self, x):
        return x * 2


def test_changed_code_is_another_entry(tmp_path, monkeypatch):
    model = nn.Sequential(nn.Linear(4, 4), Scaled())
    profile(capture(model, (torch.ones(2, 4),)), cache=tmp_path, rounds=1, check=False)
    monkeypatch.setattr(Scaled, "forward", lambda self, x: (x * 2).exp().log())
    again = profile(capture(model, (torch.ones(2, 4),)), cache=tmp_path, rounds=1, check=False)
    assert again.notes == ("1 of 2 classes read from the cache",)


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


SOURCES = (
    "return x * 2",
    "return x * 3",
    "return helper(x)",
    "return helper(x)  # and a helper that changed",
    "return sum([part.exp() for part in x.unbind(0)])",
    "return sum([part.sin() for part in x.unbind(0)])",
)


def test_code_under_the_same_name_is_told_apart_by_all_that_it_runs(tmp_path):
    """As in a notebook whose cell is edited and run again."""
    for body in SOURCES:
        space = {"nn": nn, "__name__": "notebook"}
        helper = "x.exp()" if "changed" in body else "x.sin()"
        exec(f"def helper(x):\n return {helper}", space)
        exec(f"class Edited(nn.Module):\n def forward(self, x):\n  {body}", space)
        model = nn.Sequential(nn.Linear(4, 4), space["Edited"]())
        graph = capture(model, (torch.ones(2, 4),), basic_blocks=("Edited",))
        found = profile(graph, (torch.ones(2, 4),), cache=tmp_path, rounds=1, check=False)
        # A sum over the rows has other sizes, and with them the layer before another gradient.
        assert found.notes in ((), ("1 of 2 classes read from the cache",)), body


def _write(folder):
    found = Measurement(
        *[Reading(1.0)] * 4,
        NodeMemory(aliases=(-1,)),
        KernelCounts((KernelWork("float32", True, 1, 2),)),
        KernelCounts(),
    )
    for _ in range(100):
        ProfileCache(folder, "one").write("node", found)


def test_several_processes_may_write_at_once(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path,)) for _ in range(3)]
    for writer in writers:
        writer.start()
    seen = [ProfileCache(tmp_path, "one").read("node") for _ in range(300)]
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0, 0, 0]
    written = ProfileCache(tmp_path, "one").read("node")
    assert written is not None
    assert {found for found in seen if found is not None} <= {written}
    assert len(list(tmp_path.iterdir())) == 1  # and no half of a file


def test_entries_that_cannot_be_read_are_measured_again(graph, tmp_path):
    profile(graph, cache=tmp_path, rounds=1, check=False)
    for path in list(tmp_path.iterdir()):
        path.unlink()
        path.mkdir()  # a folder in its place can be neither read nor replaced
    found = profile(graph, cache=tmp_path, rounds=1, check=False)
    assert found.notes == ()
    assert {cost.source for cost in found} == {"measured"}
    assert not list(tmp_path.glob("*.part"))
