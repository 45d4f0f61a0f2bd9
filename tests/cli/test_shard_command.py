"""`gemini shard`: table, JSON, plan file and picture; faults name their remedies."""

import json

import pytest

from gemini.cli.main import main
from gemini.tensor_parallel.shard_plan import ShardPlan

pytestmark = pytest.mark.unit

MODEL = """
import torch
from torch import nn

def block(width=32):
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

def make(device="cpu"):
    with torch.device(device):
        model = nn.Sequential(*(block() for _ in range(3)))
        return model, (torch.randn(8, 32),)

def on_meta():
    return make("meta")
"""


@pytest.fixture
def target(tmp_path):
    path = tmp_path / "shard_models.py"
    path.write_text(MODEL)
    return f"{path}:make"


def test_the_table_tells_layouts_collectives_and_memory(target, capsys, tmp_path):
    output = tmp_path / "plan.json"
    assert main(["shard", target, "--size", "2", "--gflops", "0.5", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "Sequential on 2 shards: 98" in text
    row = next(line for line in text.splitlines() if line.startswith("*.1 "))
    assert "weight S0, bias S0" in row
    assert " 2 " in row, "the first layer, whose input has no gradient, has no all-reduce in backward"
    for part in ("S1: slices", "forward: 3 all-reduce", "memory per shard:"):
        assert part in text
    assert ShardPlan.load(output).size == 2


def test_json_holds_plan_and_summary(target, capsys):
    assert main(["shard", target, "--size", "2", "--dim", "-1", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    plan = ShardPlan.from_json(data["plan"])
    assert data["sharded_share"] == plan.sharded_share
    assert sum(row["layers"] * row["bytes"] for row in data["rows"]) == sum(one.bytes for one in plan.tensors)
    assert sum(one["count"] for one in data["collectives"]) == len(plan.collectives())
    assert data["memory"]["weights"] == sum(one.shard_bytes(2) for one in plan.tensors)


def test_models_on_meta_are_planned(target, capsys):
    assert main(["shard", target.replace(":make", ":on_meta"), "--size", "4"]) == 0
    assert "on 4 shards: 98" in capsys.readouterr().out


def test_pipe_plans_the_shards_of_its_stages(target, capsys, tmp_path):
    output = tmp_path / "stages"
    arguments = ["pipe", target, "--nparts", "2", "--analytic", "cpu", "--output", str(output), "--check"]
    assert main([*arguments, "--sharding-size", "2", "--dim", "-1"]) == 0
    text = capsys.readouterr().out
    assert "Sequential on 2 shards: 9" in text
    assert "stage 1: " in text
    assert "equal the model" in text
    assert ShardPlan.load(output / "shards.json").size == 2


@pytest.mark.parametrize("suffix", [".png", ".svg", ".dot"])
def test_a_picture_of_a_layer(target, tmp_path, suffix, capsys):
    pytest.importorskip("pygraphviz")
    path = tmp_path / f"layer{suffix}"
    assert main(["shard", target, "--draw", str(path), "--scope", "1"]) == 0
    data = path.read_bytes()
    assert len(data) > 500
    assert suffix == ".png" or b"reduce" in data
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--size", "0"], "--size 0 is no number of shards"),
        (["--size", "100000"], "--size 100000: no weight can be divided by it"),
        (["--dim", "3"], "sharding_dim = 3"),
        (["--override", "0.l=replicate"], "no scope '0.l' to override"),
        (["--override", "nothing"], "is no override"),
        (["--draw", "layer.bmp"], "name a file ending in"),
        (["--scope", "encoder", "--draw", "layer.dot"], "no op runs in a scope 'encoder'"),
        (["--bandwidth", "0"], "link_gb = 0"),
        (["--shard-memory", "0.001"], "the limit is 0.001 MB"),
    ],
)
def test_faults_name_their_remedies(target, arguments, message, capsys, tmp_path):
    arguments = [str(tmp_path / one) if one.startswith("layer") else one for one in arguments]
    assert main(["shard", target, *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "→" in error
    assert not list(tmp_path.glob("layer*"))
