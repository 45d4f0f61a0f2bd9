"""Objects that a remote module mutates are mutated in the program, as on one device."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from gemini.runtime.argument_mutations import ArgumentObjects, apply_result, find_objects
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.transport.serialization import ClassTable, pack, unpack


class Slots:
    __slots__ = ("count", "keys")

    def __init__(self) -> None:
        self.count = 0


class Layer:
    """What a key-value cache keeps of one layer."""

    def __init__(self) -> None:
        self.keys: torch.Tensor | None = None
        self.is_new = True

    def update(self, keys: torch.Tensor) -> torch.Tensor:
        self.keys = keys if self.keys is None else torch.cat([self.keys, keys])
        self.is_new = False
        return self.keys


class Cache:
    def __init__(self) -> None:
        self.layers: list[Layer] = []
        self.notes: dict[str, Any] = {"seen": {1, 2}, "first": None}
        self.slots = Slots()

    @property
    def length(self) -> int:
        return len(self.layers)


class Part(nn.Module):
    """Appends to the cache, overwrites, removes, and returns the very object."""

    def __init__(self, size: int, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(size, size), number

    def forward(self, x: torch.Tensor, cache: Cache, *, also: list[Any]) -> tuple[torch.Tensor, Cache]:
        y = torch.tanh(self.linear(x))
        while len(cache.layers) <= self.number:
            cache.layers.append(Layer())
        keys = cache.layers[self.number].update(y)
        cache.notes["seen"].add(self.number + 7)
        cache.notes["first"] = cache.layers[0]
        cache.slots.count += 1
        cache.slots.keys = keys
        cache.last = (self.number, keys, cache.notes)
        if hasattr(cache, "once"):
            del cache.once
        also.append(y)
        also.sort(key=lambda one: float(one.detach().sum()))
        return y + keys.mean(0), cache


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part(8, at) for at in range(4))

    def forward(self, x: torch.Tensor, cache: Cache, also: list[Any]) -> torch.Tensor:
        for part in self.parts:
            x, found = part(x, cache, also=also)
            assert found is cache, "another object came back"
        return x


def started(pool: WorkerPool, model: nn.Module, *args: Any) -> ManagedModel:
    managed = ManagedModel(model, pool, quiet=True)
    dispatch.manage(model, managed)
    for _ in range(2):
        model(*copy.deepcopy(args))
    return managed


def flat(cache: Cache) -> list[Any]:
    notes = cache.notes
    return [
        [layer.keys for layer in cache.layers], [layer.is_new for layer in cache.layers], notes["seen"],
        notes["first"] is cache.layers[0], cache.slots.count, cache.slots.keys, cache.last[0], cache.last[1],
        cache.last[2] is notes, list(vars(cache)), hasattr(cache, "once"),
    ]  # fmt: skip


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return bool(torch.equal(one, other)) and one.requires_grad == other.requires_grad
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return bool(one == other)


@pytest.mark.slow
def test_a_cache_that_units_fill_is_the_programs(pool: WorkerPool) -> None:
    model, x = Net(), torch.randn(3, 8, requires_grad=True)
    methods = vars(Layer).copy()
    managed = started(pool, model, x, Cache(), [])
    local = copy.deepcopy(model)
    results = []
    for one in (local, model):
        cache, also, given = Cache(), [], x.detach().clone().requires_grad_()
        cache.once = 1  # type: ignore[attr-defined]
        kept = cache.layers, cache.notes, also
        for _ in range(3):
            out = one(given, cache, also)
        assert (cache.layers, cache.notes, also) == kept
        assert cache.layers is kept[0], "the list is another one"
        assert cache.notes is kept[1]
        loss = out.square().sum() + sum(layer.keys.sum() for layer in cache.layers if layer.keys is not None)
        loss.backward()
        results.append([flat(cache), also, out, given.grad, [p.grad for p in one.parameters()]])
    assert equal(*results)
    assert len(managed.remote_modules) == 4
    assert not managed.refused
    assert all(vars(Layer)[name] is method for name, method in methods.items()), "copies that came from a worker"


def test_gradients_of_gradients_run_it_again_on_what_it_was_given(pool: WorkerPool) -> None:
    model, x = Net().double(), torch.randn(3, 8, dtype=torch.float64)
    started(pool, model, x, Cache(), [])
    found = []
    for one in (copy.deepcopy(model), model):
        given, cache = x.clone().requires_grad_(), Cache()
        out = one(given, cache, [])
        (first,) = torch.autograd.grad(out.square().sum() + cache.layers[1].keys.sum(), given, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), given)
        found.append([first.detach(), second])
        assert len(cache.layers) == 4
    for expected, got in zip(*found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


class Closed(dict):  # type: ignore[type-arg]
    """A dictionary that says itself how it is pickled."""

    def __reduce__(self) -> Any:
        return Closed, (dict(self),)


class Does(nn.Module):
    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(8, 8), act

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        self.act(given)
        return self.linear(x)


REFUSED: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "generator": (lambda: torch.Generator().manual_seed(3), lambda g: torch.rand(2, generator=g)),
    "random": (lambda: random.Random(3), lambda g: g.random()),
    "closed": (lambda: Closed(a=1), lambda d: d.update(a=2)),
    "numpy": (lambda: torch.ones(3).numpy(), lambda a: a.fill(2)),
    "object as key": (dict, lambda d: d.update({Slots(): 1})),
    "bytearray": (lambda: bytearray(b"ab"), lambda b: b.extend(b"c")),
}


def state(value: Any) -> Any:
    if isinstance(value, torch.Generator):
        return value.get_state().tolist()
    if isinstance(value, random.Random):
        return value.getstate()
    return repr(value) if "Slots" not in repr(value) else len(value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_told_is_done_here(name: str, pool: WorkerPool) -> None:
    make, act = REFUSED[name]

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Does(act), Does(act)

        def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
            return self.second(self.first(x, given), given)

    model = Two()
    managed = started(pool, model, torch.randn(2, 8), make())
    here, there = make(), make()
    x = torch.randn(2, 8)
    expected = copy.deepcopy(model)(x, here)
    assert torch.equal(expected, model(x, there))
    assert state(here) == state(there)
    assert "first" in managed.refused


def raises(given: list[int]) -> None:
    given.append(1)
    if len(given) == 3:
        raise ValueError("three")


def test_an_object_changed_before_an_exception_is_changed(pool: WorkerPool) -> None:
    model = nn.ModuleList([Does(raises), Does(raises)])
    model.forward = lambda x, given: model[1](model[0](x, given), given)  # type: ignore[method-assign]
    started(pool, model, torch.randn(2, 8), [])
    given = [0, 0]
    with pytest.raises(ValueError, match="three"):
        model(torch.randn(2, 8), given)
    assert given == [0, 0, 1]


def test_changes_are_done_in_place_and_only_they() -> None:
    shared = [1, 2]
    mine: Any = [shared, {"a": shared, ("k", 1): OrderedDict(x=1)}, defaultdict(list), Slots(), {3, 4}]
    classes = ClassTable()
    body, tensors = pack((tuple(mine), {}), classes)
    copies, _ = unpack(body, tensors, classes)
    given = ArgumentObjects(copies, {}, classes)
    assert given.changes() == {}
    copies[0].append(copies[3])
    copies[1]["b"] = copies[2]
    copies[2]["n"].append(copies[1])
    copies[4].discard(3)
    del copies[3].count
    copies[3].keys = copies[0]
    changes = given.changes()
    assert isinstance(changes, dict)
    objects = find_objects(tuple(mine), {})
    parcel, tensors = given.pack_result(copies[0], changes)
    result, changed = apply_result(unpack(parcel, tensors, classes, objects), objects)
    assert changed
    assert result is shared
    assert mine[1]["a"] is shared
    assert shared[2] is mine[3]
    assert mine[3].keys is shared
    assert mine[1]["b"] is mine[2]
    assert mine[2]["n"][0] is mine[1]
    assert mine[4] == {4}
    assert not hasattr(mine[3], "count")


def test_other_objects_on_the_other_side_are_a_fault_of_ours() -> None:
    classes = ClassTable()
    given = ArgumentObjects(([1],), {}, classes)
    parcel, tensors = given.pack_result(1, {})
    with pytest.raises(TypeError, match="other objects"):
        apply_result(unpack(parcel, tensors, classes), [{}])


class Looks(nn.Module):
    """Passes a cache on, and uses what another part has put there if told to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(8, 8), number
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor, cache: dict[str, Any], looks: str) -> tuple[torch.Tensor, Any]:
        self.count += 1
        y = torch.dropout(self.linear(x), 0.3, self.training)
        for key, held in list(cache.items()):
            if looks == "shape":
                y = y + held.shape[0]
            if looks == "contents" and self.number % 2:
                y = y + held.sum()
            if looks == "quietly":
                try:
                    y = y * held.mean()
                except BaseException:  # the unit's own code may catch anything
                    y = y * 2
            cache[key] = held
        cache[str(self.number)] = y
        return y, cache.get("0")


@pytest.mark.parametrize("looks", ["", "shape", "contents", "quietly"])
def test_tensors_inside_objects_stay_at_home_until_they_are_used(looks: str, pool: WorkerPool) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Looks(at) for at in range(4))

        def forward(self, x: torch.Tensor, looks: str) -> tuple[torch.Tensor, dict[str, Any], list[Any]]:
            cache: dict[str, Any] = {}
            found = []
            for part in self.parts:
                x, first = part(x, cache, looks)
                found.append(first is cache["0"])
            return x, cache, found

    model, x = Chain(), torch.randn(3, 8)
    managed = started(pool, model, x, "")
    local = copy.deepcopy(model)
    assert not any(unit.needs_all for unit in managed.remote_modules.values())
    results, gradients = [], []
    for one in (local, model):
        torch.manual_seed(2)
        given = x.clone().requires_grad_()
        for _ in range(2):
            out, cache, found = one(given, looks)
            (out.sum() + cache["0"].square().sum() + cache["2"].sum()).backward()
        results.append([out, list(cache.values()), found, [*one.buffers()], torch.get_rng_state()])
        gradients.append([given.grad, *(p.grad for p in one.parameters())])
    assert equal(*results)
    torch.testing.assert_close(*gradients)  # sums in another order
    assert len(managed.remote_modules) == 4
    assert not managed.refused
    # The first part is given an empty cache, the second one with nothing but its own input.
    users = {"": 0, "shape": 0, "contents": 1, "quietly": 2}[looks]
    assert sum(unit.needs_all for unit in managed.remote_modules.values()) == users
