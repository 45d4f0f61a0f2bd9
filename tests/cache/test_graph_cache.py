"""A cached graph is reused only where nothing it depends on has changed."""

from __future__ import annotations

import importlib.util
import shutil
import sys

import pytest
import torch

from gemini.cache import graphs
from tests.pipe.models import make

SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.norm = nn.BatchNorm1d(4)
        self.scale = 2.0

    def forward(self, x, extra=None):
        for layer in self.layers:
            x = torch.relu(layer(x)) * self.scale
        return self.norm(x) if extra is None else x + extra
"""


@pytest.fixture
def captures(monkeypatch):
    """The captures that really happen."""
    seen = []

    def counted(model, *args, real=graphs.capture, **kwargs):
        seen.append(type(model).__name__)
        return real(model, *args, **kwargs)

    monkeypatch.setattr(graphs, "capture", counted)
    return seen


@pytest.fixture
def net(tmp_path):
    """Makes the model from its file, as it is now."""

    def load():
        path = tmp_path / "net_of_a_test.py"
        if not path.exists():
            path.write_text(SOURCE)
        spec = importlib.util.spec_from_file_location("net_of_a_test", path)
        module = sys.modules["net_of_a_test"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        return module.Net()

    yield load
    sys.modules.pop("net_of_a_test", None)


def test_the_second_time_nothing_is_captured(pipe, net, tmp_path, captures):
    x = torch.randn(4, 4)
    first = pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")
    model = net()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    generator = torch.get_rng_state()
    second = pipe(model, (x,), nparts=2, cache=tmp_path / "cache")
    assert captures == ["Net"]
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), generator)
    assert second.sources == first.sources
    assert second.check((x,)).is_exact
    assert second.check((torch.randn(6, 4),)).is_exact


@pytest.mark.parametrize(
    "change",
    [
        {"args": (torch.randn(3, 4), torch.randn(4))},
        {"args": (torch.randn(3, 4).double(),), "model": lambda m: m.double()},
        {"model": lambda m: m.eval()},
        {"model": lambda m: setattr(m, "scale", 3.0) or m},
        {"model": lambda m: m.layers[0].requires_grad_(False) and m},
        {"depth": 1},
        {"basic_blocks": ("ModuleList",)},
    ],
    ids=["arguments", "precision", "mode", "attribute", "frozen", "depth", "blocks"],
)
def test_what_changes_the_graph_is_captured_anew(pipe, net, tmp_path, captures, change):
    x = torch.randn(3, 4)
    pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")
    model = change.get("model", lambda m: m)(net())
    settings = {key: value for key, value in change.items() if key in ("depth", "basic_blocks")}
    args = change.get("args", (x,))
    piped = pipe(model, args, nparts=2, cache=tmp_path / "cache", **settings)
    assert captures == ["Net", "Net"]
    assert piped.check(args).is_right


def test_changed_code_is_captured_anew(pipe, net, tmp_path, captures):
    x = torch.randn(3, 4)
    pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")
    (tmp_path / "net_of_a_test.py").write_text(SOURCE.replace("torch.relu", "torch.tanh"))
    piped = pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")
    assert captures == ["Net", "Net"]
    assert piped.check((x,)).is_exact


def test_a_kept_graph_that_differs_from_the_model_is_not_used(pipe, net, tmp_path, captures):
    """Even if its key were the same."""
    x = torch.randn(3, 4)
    pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")
    (file,) = (tmp_path / "cache" / "graphs").glob("*/graph.json")
    file.write_text(file.read_text().replace("relu", "tanh"))
    piped = pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")
    assert captures == ["Net", "Net"]
    assert piped.check((x,)).is_exact
    for count, text in enumerate(("{", "[" * 100_000, "")):
        file.write_text(text)
        pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")
        assert len(captures) == 3 + count
    file.with_suffix(".safetensors").write_bytes(b"no tensors")
    pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")
    assert len(captures) == 6


def test_runs_that_share_a_cache(pipe, net, tmp_path, captures, monkeypatch):
    """Another run replaces the graph while this one looks at it."""
    x = torch.randn(3, 4)
    pipe(net(), (x,), nparts=2, cache=tmp_path / "cache")

    def agrees(*given, real=graphs._agrees):
        shutil.rmtree(tmp_path / "cache" / "graphs")
        return real(*given)

    monkeypatch.setattr(graphs, "_agrees", agrees)
    assert pipe(net(), (x,), nparts=2, cache=tmp_path / "cache").check((x,)).is_exact
    assert captures == ["Net"]


def test_a_cache_that_cannot_be_written_is_no_error(pipe, net, tmp_path, captures):
    (tmp_path / "cache").write_text("a file")
    x = torch.randn(3, 4)
    for _ in range(2):
        assert pipe(net(), (x,), nparts=2, cache=tmp_path / "cache").check((x,)).is_exact
    assert len(captures) == 2


def test_old_graphs_go(pipe, net, tmp_path, monkeypatch):
    monkeypatch.setattr(graphs, "_LIMIT", 2)
    for width in (3, 4, 5):
        pipe(net(), (torch.randn(3, 4), torch.randn(width, 1, 4)), nparts=2, cache=tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "graphs").iterdir())) == 2


@pytest.mark.parametrize("name", ["bert", "t5", "unet", "experts", "nested", "held"])
def test_kept_graphs_run_like_the_model(pipe, name, tmp_path, captures):
    for seed in (0, 1):
        model, args, kwargs = make(name)
        torch.manual_seed(seed)
        piped = pipe(model, args, kwargs, nparts=3, cache=tmp_path)
        report = piped.check(args, kwargs)
        assert report.is_right, str(report)
    assert len(captures) == 1
    shutil.rmtree(tmp_path / "graphs")


def test_a_switch_of_the_program_that_changes_only_gradients_is_seen(pipe, net, tmp_path):
    path = tmp_path / "net_of_a_test.py"
    frozen = SOURCE.replace("        return", "        x = x.detach() if FROZEN else x\n        return")
    path.write_text(f"{frozen}\nFROZEN = False\n")
    x = torch.randn(4, 4)

    def trained(frozen):
        model = net()
        sys.modules["net_of_a_test"].FROZEN = frozen
        piped = pipe(model, (x,), nparts=2, cache=tmp_path / "cache")
        piped(x).square().sum().backward()
        return [name for name, one in model.named_parameters() if one.grad is not None]

    every = trained(False)
    assert trained(True) == ["norm.weight", "norm.bias"]
    assert trained(False) == every
