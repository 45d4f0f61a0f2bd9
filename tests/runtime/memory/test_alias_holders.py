"""What holds the address of memory is found; what reaches the memory through tensors is none."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.memory import alias_holders
from gemini.runtime.memory.alias_holders import find_holders


def parameter() -> nn.Parameter:
    return nn.Parameter(torch.randn(4, 4))


def generator(value: Any) -> Iterator[Any]:
    held = value
    yield held
    yield held


def hold_in_frame(tensor: torch.Tensor, ask: Callable[[], dict[int, str]]) -> dict[int, str]:
    held, alias = tensor, tensor.detach()
    again = alias
    found = ask()
    return found if again is alias and held is tensor else {}


# ── holders ───────────────────────────────────────────────────────────────────────────────────────────────────────
HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an array": lambda p: p.detach().numpy(),
    "an array of a part": lambda p: p.detach()[1:].numpy(),
    "a memory view": lambda p: memoryview(p.detach().numpy()),
    "an array and its tensor": lambda p: [held := p.detach(), held.numpy()],
    "a view of an array": lambda p: p.detach().numpy()[1:].T,
    "ctypes": lambda p: p.detach().numpy().ctypes,
    "a capsule": lambda p: torch.utils.dlpack.to_dlpack(p.detach()),
    "an array by DLPack": lambda p: np.from_dlpack(p.detach()),
    "a tensor by DLPack": lambda p: torch.from_dlpack(p.detach()),
    "a tensor of an array": lambda p: torch.from_numpy(p.detach().numpy()),
    "a part of the storage": lambda p: p.untyped_storage()[8:24],
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*HOLDERS])
def test_a_holder_is_found_as_long_as_it_lives(name: str) -> None:
    weight = parameter()
    held = HOLDERS[name](weight)
    assert [*find_holders([weight])] == [weight.untyped_storage()._cdata]
    del held
    assert not find_holders([weight])


def test_an_array_of_a_buffer_is_found() -> None:
    buffer = torch.zeros(4)
    held = buffer.numpy()
    assert find_holders([buffer])
    assert held is not None


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("make", "holder"),
    [
        (lambda: torch.from_numpy(_HELD), "the object that it was made from"),
        (lambda: torch.frombuffer(bytearray(16), dtype=torch.float32), "the object that it was made from"),
        (lambda: torch.ones(4).share_memory_(), "other processes"),
        (lambda: torch.empty(0).set_(torch.ones(4).untyped_storage()[4:12]), "an allocator other than torch's"),
    ],
    ids=["array", "bytes", "shared", "slice"],
)
def test_memory_of_others_is_named(make: Callable[[], torch.Tensor], holder: str) -> None:
    tensor = make()
    assert [text.partition(" (")[0] for text in find_holders([tensor]).values()] == [holder]


_HELD = np.ones(4)


# ── none ──────────────────────────────────────────────────────────────────────────────────────────────────────────
ALIASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "nothing": lambda _: None,
    "a state dict": lambda p: {"w": p.detach()},
    "views": lambda p: [p.data.t()[1:], p.detach().view(-1), p[0]],
    "a view with a graph": lambda p: p.view(-1) * 2,
    "a graph": lambda p: F.linear(torch.randn(2, 4, requires_grad=True), p),
    "two graphs": lambda p: [F.linear(torch.randn(2, 4, requires_grad=True), p) for _ in range(2)],
    "the graph after backward": lambda p: (loss := F.linear(torch.randn(2, 4), p).sum(), loss.backward()),
    "a graph from before it was frozen": lambda p: [F.linear(torch.randn(2, 4), p), p.requires_grad_(False)],
    "an optimizer": lambda p: torch.optim.Adam([p]),
    "a generator": lambda p: next(held := generator(p)) is None or held,
    "a closure": lambda p: lambda: p,
    "containers": lambda p: [{p}, (p, p), {1: p.detach()}],
    "a copy": copy.deepcopy,
    "the storage": lambda p: p.untyped_storage(),
    "a lazy copy": lambda p: torch._lazy_clone(p.detach()),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*ALIASES])
def test_aliases_are_no_holders(name: str) -> None:
    weight = parameter()
    weight.detach().numpy()  # all references are counted from now on
    held = ALIASES[name](weight)
    assert not find_holders([weight])
    del held


def test_local_variables_of_running_functions_are_no_holders() -> None:
    weight = parameter()
    weight.detach().numpy()
    assert not hold_in_frame(weight, lambda: find_holders([weight]))
    array: list[Any] = []

    def find() -> dict[int, str]:
        array.append(weight.detach().numpy())
        return find_holders([weight])

    assert hold_in_frame(weight, find)


def modules() -> dict[str, tuple[nn.Module, Callable[[nn.Module], Any]]]:
    tokens = torch.ones(3, 2, dtype=torch.long)
    return {
        "lstm": (nn.LSTM(4, 4, 2, bidirectional=True), lambda m: m(torch.randn(3, 2, 4))),
        "transformer": (nn.TransformerEncoderLayer(8, 2, 16), lambda m: m(torch.randn(3, 2, 8))),
        "batch norm": (nn.BatchNorm1d(4), lambda m: m(m(torch.randn(3, 4)))),
        "convolution": (nn.Conv2d(2, 2, 3), lambda m: m(torch.randn(1, 2, 8, 8, requires_grad=True))),
        "embedding": (nn.Embedding(5, 4), lambda m: F.linear(m(tokens), m.weight)),  # type: ignore[arg-type]
        "weight norm": (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), lambda m: m(torch.randn(2, 4))),
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*modules()])
def test_models_with_live_graphs_have_no_holders(name: str) -> None:
    module, call = modules()[name]
    output = call(module)
    for _ in range(2):
        assert not find_holders([*module.parameters(), *module.buffers()])
        for tensor in module.state_dict().values():
            tensor.numpy()
    assert output is not None


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_compiled_modules_are_no_holders() -> None:
    traced = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
    assert not find_holders(traced.parameters())
    held = traced.weight.detach().numpy()
    assert [*find_holders(traced.parameters())] == [traced.weight.untyped_storage()._cdata]
    assert held is not None


@pytest.mark.slow
def test_weights_from_files_have_no_holders(tmp_path: Path) -> None:
    save_file = pytest.importorskip("safetensors.torch").save_file
    load_file = pytest.importorskip("safetensors.torch").load_file
    held = {"one": torch.ones(8), "two": torch.ones(2000)}
    save_file(held, tmp_path / "held.safetensors")
    torch.save(held, tmp_path / "held.pt")
    for found in (
        load_file(tmp_path / "held.safetensors"), torch.load(tmp_path / "held.pt"),
        torch.load(tmp_path / "held.pt", mmap=True),
    ):  # fmt: skip
        assert not find_holders(found.values())
        array = found["one"].numpy()
        assert [*find_holders(found.values())] == [found["one"].untyped_storage()._cdata]
        del array


def test_an_array_that_only_the_tensor_owns_is_no_holder() -> None:
    array = np.ones((4, 4))
    tensor = torch.from_numpy(array.T)
    assert find_holders([tensor])
    del array
    assert not find_holders([tensor])


def test_a_local_variable_of_another_thread_is_no_holder() -> None:
    buffer = torch.zeros(4)
    buffer.numpy()
    ready, done = threading.Event(), threading.Event()

    def run() -> None:
        held = buffer
        ready.set()
        done.wait(30)
        assert held is buffer

    thread = threading.Thread(target=run)
    thread.start()
    ready.wait(30)
    try:
        assert not find_holders([buffer])
    finally:
        done.set()
        thread.join()


def test_a_search_keeps_nothing() -> None:
    weight = parameter()
    weight.detach().numpy()
    gc.collect()
    gc.disable()
    try:

        def find() -> weakref.ref[Any]:
            held = parameter()
            local = weight.detach().numpy()
            assert find_holders([weight])
            assert local is not None
            return weakref.ref(held)

        assert find()() is None
    finally:
        gc.enable()


def test_the_heap_is_searched_once_for_all_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [parameter() for _ in range(50)]
    held = [one.data for one in tensors]
    searched = []
    search = alias_holders.gc.get_objects
    monkeypatch.setattr(alias_holders.gc, "get_objects", lambda: searched.append(1) or search())
    assert not find_holders(tensors)
    assert len(searched) == 1
    assert not find_holders([parameter() for _ in range(50)])
    assert len(searched) == 1
    assert held
