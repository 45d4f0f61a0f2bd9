"""Generated source compiles, passes linters, is formatted, deterministic and short."""

from __future__ import annotations

import importlib.util
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from conformance.zoo.classics import CLASSICS
from gemini.capture import capture
from gemini.codegen import generate_stages
from tests.codegen.cutting import captured, even_cut, random_cut

RUFF = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")


def sources(name: str, nstages: int) -> list[str]:
    graph, _, _ = captured(name)
    return [code.source for code in generate_stages(graph, even_cut(graph, nstages))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All classics in one, two and random stages."""
    folder = tmp_path_factory.mktemp("stages")
    for name in CLASSICS:
        graph, _, _ = captured(name)
        cuts = [even_cut(graph, 1), even_cut(graph, 2), random_cut(graph, random.Random(name))]
        for at, partition in enumerate(cuts):
            for code in generate_stages(graph, partition):
                (folder / f"{name}_{at}_{code.class_name}.py").write_text(code.source, encoding="utf-8")
    return folder


@pytest.mark.slow
def test_no_line_is_too_long(folder):
    for path in folder.glob("*.py"):
        assert max(map(len, path.read_text().splitlines())) <= 120, path.name


@pytest.mark.skipif(RUFF is None, reason="ruff is not installed")
def test_linters_and_formatters_have_nothing_to_say(folder):
    common = ["--isolated", "--line-length", "120", str(folder)]
    for command in (["check", "--select", "F,E7,E9,W,B,UP,PIE"], ["format", "--check", "--diff"]):
        done = subprocess.run([str(RUFF), *command, *common], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_generation_is_deterministic():
    for name in ("unet", "rotary_language_model", "mutable_cache", "tied_language_model"):
        assert sources(name, 3) == sources(name, 3)


def test_a_skip_list_and_layers_are_a_loop():
    text = sources("unet", 1)[0]
    assert "xs = []" in text
    assert "x = F.relu(down(x))\n            xs.append(x)\n            x = F.max_pool2d(x, 2)" in text


class Deep(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(depth))
        self.head = nn.Linear(8, 2)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_the_length_does_not_grow_with_the_number_of_layers():
    lengths = []
    for depth in (6, 12):
        graph = capture(Deep(depth), (torch.randn(4, 5, 8),))
        lengths.append(sum(len(code.source.splitlines()) for code in generate_stages(graph, even_cut(graph, 1))))
    assert lengths[0] == lengths[1]


def test_a_stage_file_loads_in_a_fresh_process(tmp_path):
    graph, _, _ = captured("mlp")
    codes = generate_stages(graph, even_cut(graph, 2))
    for code in codes:
        (tmp_path / f"{code.class_name.lower()}.py").write_text(code.source, encoding="utf-8")
    script = "import torch, stage0, stage1\nfrom conformance.zoo.classics import CLASSICS\n"
    script += "model, args, _ = CLASSICS['mlp']()\none, two = stage0.Stage0(model), stage1.Stage1(model)\n"
    script += "assert torch.equal(two(one(*args)), model(*args))\nprint('equal')"
    assert importlib.util.find_spec("conformance.zoo.classics") is not None
    paths = f"{tmp_path}:{Path.cwd()}"
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": paths}, capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "equal", done.stderr
