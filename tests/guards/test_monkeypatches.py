"""Library functions and methods that a program replaces are called in its own process."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, GPT2Config, GPT2LMHeadModel, pytorch_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2 import modeling_gpt2

from gemini import GeminiCompiler, GeminiConfig
from gemini.guards.monkeypatches import LibraryPatches, describe_classes, find_torch_patch
from gemini.step import split_backward_ops

Patch = Callable[[pytest.MonkeyPatch], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(6, 16), nn.Linear(16, 3), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.act(F.relu(self.first(x))))


def replace_function(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "relu", lambda x, inplace=False: torch.tanh(x) * 0.5)


def replace_method(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.GELU, "forward", lambda self, x: torch.tanh(x) * 0.5)


def replace_by_another(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(F, "relu", torch.tanh)


def train(model: nn.Module, replace: Patch, step: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        for at in range(7):
            if at == step:
                replace(patch)
            loss = model(torch.randn(8, 6, generator=generator)).square().mean()
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
            seen.append(loss.item())
    return seen


@pytest.mark.parametrize("replace", [replace_function, replace_method, replace_by_another])
@pytest.mark.parametrize(("schedule", "step"), [("auto", 0), ("auto", 4), ("none", 4)])
def test_the_programs_own_is_called(
    replace: Patch, schedule: str, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Net()
    expected = train(copy.deepcopy(model), replace, step)
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule=schedule, run_folder=str(tmp_path)
    )
    GeminiCompiler().compiler(model, config)
    assert train(model, replace, step) == pytest.approx(expected, rel=1e-5)
    name = "GELU.forward" if replace is replace_method else "torch.nn.functional.relu"
    assert f"the script has replaced {name}" in capsys.readouterr().err


def test_what_was_replaced_and_is_as_before_is_no_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = LibraryPatches(Net())
    assert not methods.check(None)
    assert not find_torch_patch()
    with monkeypatch.context() as patch:
        replace_function(patch)
        assert find_torch_patch() == "torch.nn.functional.relu"
        replace_method(patch)
        assert "GELU.forward" in methods.check(None)
    assert not methods.check(None)
    assert not find_torch_patch()


def test_partial_functions_and_wrapped_ones_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(x: Any, **_: Any) -> Any:
        return x

    own = F.gelu
    for one in (functools.partial(other, k=1), functools.wraps(own)(other), functools.partial(own, approximate="tanh")):
        with monkeypatch.context() as patch:
            patch.setattr(F, "gelu", one)
            assert find_torch_patch() == "torch.nn.functional.gelu"


class OfALibrary(nn.Module):
    """Calls a function of a library by the library's module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(pytorch_utils.apply_chunking_to_forward(F.tanh, 0, 1, self.first(x)))


def replace_in_a_library(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(pytorch_utils, "apply_chunking_to_forward", lambda function, size, dim, x: torch.sin(3 * x))


@pytest.mark.parametrize(("schedule", "step"), [("auto", 0), ("auto", 4), ("none", 4)])
def test_functions_of_other_libraries_count(
    schedule: str, step: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = OfALibrary()
    expected = train(copy.deepcopy(model), replace_in_a_library, step)
    config = GeminiConfig(
        mode="pipeline", pipeline_degree=2, accum_degree=2, schedule=schedule, run_folder=str(tmp_path)
    )
    GeminiCompiler().compiler(model, config)
    assert train(model, replace_in_a_library, step) == pytest.approx(expected, rel=1e-5)
    said = "the script has replaced transformers.pytorch_utils.apply_chunking_to_forward"
    assert said in capsys.readouterr().err


def test_functions_that_methods_of_a_library_reach_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    methods = LibraryPatches(model)
    assert not methods.check(None)
    monkeypatch.setattr(modeling_gpt2, "eager_attention_forward", lambda *given, **named: given)
    assert "modeling_gpt2.eager_attention_forward" in methods.check(None)
    assert "modeling_gpt2.eager_attention_forward" in LibraryPatches(model).check(None)


def test_functions_in_tables_of_a_library_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=8, bos_token_id=0, eos_token_id=0)
    methods = LibraryPatches(GPT2LMHeadModel(config))
    assert not methods.check(None)
    with monkeypatch.context() as patch:
        patch.setitem(AttentionInterface._global_mapping, "mine", lambda *given, **named: given)
        assert "ALL_ATTENTION_FUNCTIONS.mine" in methods.check(None)
    assert not methods.check(None)
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", lambda *given, **named: given)
    assert "ALL_ATTENTION_FUNCTIONS.sdpa" in methods.check(None)


def test_attributes_of_classes_of_a_library_count(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    methods = LibraryPatches(model)
    fresh = describe_classes(methods.library_classes())
    methods.learn(fresh)
    for kind, name in ((modeling_gpt2.GPT2Attention, "is_causal"), (nn.Module, "gain")):
        assert not methods.check(None)
        with monkeypatch.context() as patch:
            patch.setattr(kind, name, 2, raising=False)
            assert f"{kind.__name__}.{name}" in methods.check(None)
            late = LibraryPatches(model)
            assert not late.check(None)  # nobody knows
            late.learn(fresh)
            assert f"{kind.__name__}.{name}" in late.check(None)


def test_functions_of_the_library_itself_count_in_its_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=8, bos_token_id=0, eos_token_id=0)
    model = GPT2LMHeadModel(config)
    untouched = LibraryPatches(model)
    fresh = describe_classes(untouched.library_classes())
    untouched.learn(fresh)
    assert not untouched.check(None)
    table = AttentionInterface._global_mapping
    for name, function in (("mine", modeling_gpt2.eager_attention_forward), ("sdpa", table["flash_attention_2"])):
        with monkeypatch.context() as patch:
            patch.setitem(table, name, function)
            methods = LibraryPatches(model)
            methods.learn(fresh)
            assert f"ALL_ATTENTION_FUNCTIONS.{name}" in methods.check(None)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.gain


def test_an_attribute_that_is_added_before_the_start_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nn.Linear, "gain", 0.5, raising=False)
    torch.manual_seed(0)
    model = nn.Sequential(Scaled(6, 16), nn.Tanh(), Scaled(16, 3))
    expected = train(copy.deepcopy(model), lambda _: None, 0)
    config = GeminiConfig(mode="pipeline", pipeline_degree=2, accum_degree=2, run_folder=str(tmp_path))
    GeminiCompiler().compiler(model, config)
    assert train(model, lambda _: None, 0) == pytest.approx(expected, rel=1e-5)
    assert "the script has replaced Linear.gain" in capsys.readouterr().err


def test_what_does_not_compute_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda *given, **named: given)
    monkeypatch.setattr(torch.Tensor, "__repr__", lambda self: "a tensor")
    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)
    assert not find_torch_patch()
    monkeypatch.setattr(torch, "matmul", lambda *given: given)
    assert find_torch_patch() == "torch.matmul"


def test_what_stages_use_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("linear", "embedding", "conv1d", "conv2d", "conv3d"):
        monkeypatch.setattr(F, name, getattr(F, name))  # put back afterwards
    split_backward_ops.install()
    assert isinstance(F.conv2d, functools.partial)
    assert not find_torch_patch()
