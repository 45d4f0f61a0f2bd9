"""Pictures of partitions are written in every format, deterministically; unknown formats are refused first."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from gemini.capture import capture
from gemini.errors import ArtifactError
from gemini.partition import Analysis, Options, Partition, Worker, analyse
from gemini.partition.analysis.analysis_picture import darken, stage_colour
from gemini.profiling import profile
from gemini.schedule.link_costs import Links
from tests.profiling.models import CASES

MARKS = {"svg": b"<svg", "png": b"\x89PNG", "pdf": b"%PDF"}


@cache
def analysed(mixed=False):
    torch.manual_seed(0)
    model, args, kwargs = CASES["tied"]()
    graph = capture(model, args, kwargs)
    nodes = [node.id for node in graph.compute_nodes]
    stages = tuple(tuple(nodes[at : at + 6]) for at in range(0, len(nodes), 6))
    workers = tuple(at % 2 for at in range(len(stages))) if mixed else tuple(range(len(stages)))
    made = Partition("Tied", "hand", 1 + max(workers), stages, workers)
    limits = tuple(Worker(memory_mb=0.05) for _ in range(made.nparts)) if mixed else ()
    options = Options(workers=limits, links=Links(0.001, 1e6) if mixed else Links())
    return analyse(graph, profile(graph, args, kwargs, analytic="cpu"), made, options)


@pytest.mark.parametrize("form", MARKS)
@pytest.mark.parametrize("mixed", [False, True])
def test_bars_and_graph(form, mixed, tmp_path):
    files = analysed(mixed).draw(tmp_path / f"cut.{form}")
    assert files == [tmp_path / f"cut.{form}", tmp_path / f"cut.graph.{form}"]
    for file in files:
        assert MARKS[form] in file.read_bytes()[:1000]


def test_every_stage_is_named_in_its_colour(tmp_path):
    analysis = analysed()
    bars, graph = (path.read_text() for path in analysis.draw(tmp_path / "cut.svg"))
    for stage in analysis.stages:
        assert stage_colour(stage.stage) in bars
        assert darken(stage_colour(stage.stage)) in bars
        assert stage_colour(stage.stage) in graph
        assert f"stage {stage.stage}<" in graph


def test_the_same_picture_twice(tmp_path):
    one, other = (analysed(True).draw(tmp_path / f"{name}.svg")[0].read_bytes() for name in "ab")
    assert one == other


def test_without_a_graph_there_are_only_bars(tmp_path):
    loaded = Analysis.from_json(analysed().to_json())
    assert loaded.draw(tmp_path / "cut.png") == [tmp_path / "cut.png"]


@pytest.mark.parametrize("name", ["cut", "cut.bmp", "cut.json"])
def test_other_formats_are_refused(name, tmp_path):
    with pytest.raises(ArtifactError, match=r"\.svg, \.png, \.pdf"):
        analysed().draw(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist(tmp_path):
    with pytest.raises(ArtifactError, match="cannot be written"):
        analysed().draw(tmp_path / "missing" / "cut.svg")
