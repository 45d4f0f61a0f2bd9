"""Changes of the Python state that a forward reads are detected; changes of other state are ignored."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemini.capture import capture, python_state


class Base(nn.Module):
    factor = 1.0

    def __init__(self):
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(0.5)
        self.config = Config()
        self.options = {"scale": 1.0, "list": [1.0]}
        self.act, self.order, self.step, self._hidden = F.relu, [self.a, self.b], 0, 2.0
        self.log: list[float] = []


class Config:
    def __init__(self):
        self.scale, self.nested = 2.0, {"x": [1.0]}


class ReadsConfig(Base):
    def forward(self, x):
        return self.b(self.a(x) * self.config.scale) * self.config.nested["x"][0]


class ReadsContainers(Base):
    def forward(self, x):
        return self.b(self.a(x) * self.options["scale"]) * self.options["list"][0]


class ReadsLeaf(Base):
    """The dropout layer runs as a node of its own; its rate is read by the glue, too."""

    def forward(self, x):
        return self.b(self.drop(self.a(x)) * self.drop.p)


class ReadsFunction(Base):
    def forward(self, x):
        return self.b(self.act(self.a(x)))


class ReadsOrder(Base):
    def forward(self, x):
        for layer in self.order:
            x = torch.relu(layer(x))
        return x


class ReadsClass(Base):
    def forward(self, x):
        return self.b(self.a(x) * self.factor) * self._hidden


class ReadsAbsence(Base):
    def forward(self, x):
        y = self.a(x)
        return self.b(y) if hasattr(self, "extra") else y


CHANGES = [
    (ReadsConfig, lambda m: setattr(m.config, "scale", 5.0)),
    (ReadsConfig, lambda m: m.config.nested["x"].__setitem__(0, 7.0)),
    (ReadsContainers, lambda m: m.options.update(scale=3.0)),
    (ReadsContainers, lambda m: m.options["list"].__setitem__(0, 3.0)),
    (ReadsLeaf, lambda m: setattr(m.drop, "p", 0.25)),
    (ReadsFunction, lambda m: setattr(m, "act", F.gelu)),
    (ReadsFunction, lambda m: setattr(m, "act", lambda x: x * 2)),
    (ReadsOrder, lambda m: m.order.reverse()),
    (ReadsOrder, lambda m: m.order.append(m.a)),
    (ReadsClass, lambda m: setattr(type(m), "factor", 3.0)),
    (ReadsClass, lambda m: setattr(m, "_hidden", 3.0)),
    (ReadsAbsence, lambda m: setattr(m, "extra", True)),
]


def same(graph, model, x):
    torch.manual_seed(1)
    expected = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(graph.run(x), expected)


@pytest.mark.parametrize(("cls", "change"), CHANGES)
def test_what_the_glue_reads_is_guarded(cls, change):
    torch.manual_seed(0)
    model = type(cls.__name__, (cls,), {})().train()  # a class of its own: some tests change it
    x = torch.randn(4, 8)
    graph = capture(model, (x,))
    same(graph, model, x)
    assert graph.variants.captured == 0
    change(model)
    same(graph, model, x)
    assert graph.variants.captured == 1


def test_what_it_does_not_read_is_not():
    model = ReadsClass().train()
    x = torch.randn(4, 8)
    graph = capture(model, (x,))
    for step in range(5):
        model.step = step
        model.log.append(0.1 * step)
        model.options["scale"] = step
        model.epoch = step
        same(graph, model, x)
    assert graph.variants.captured == 0


def test_sizes_kept_in_attributes_are_computed_anew():
    class Keeps(Base):
        def forward(self, x):
            self.last = x.shape[0]
            return self.b(self.a(x)) * self.last

    model = Keeps()
    graph = capture(model, (torch.randn(4, 8),))
    assert graph.blocks == {}
    for rows in (4, 2, 7):
        same(graph, model, torch.randn(rows, 8))
        assert model.last == rows
        assert type(model.last) is int
    assert graph.variants.captured == 0


def test_containers_of_a_class_of_their_own_are_compared_by_items():
    class Settings(dict):
        """A dictionary that says otherwise how it is copied."""

        def copy(self):
            return dict(self)

    class Configured(Base):
        def __init__(self):
            super().__init__()
            self.settings = Settings(scale=2)

        def forward(self, x):
            return self.b(self.a(x)) * self.settings["scale"]

    model = Configured()
    assert capture(model, (torch.randn(4, 8),)).blocks == {}


def test_functions_of_one_name_that_a_module_holds_are_told_apart():
    def times(factor):
        return lambda value: value * factor

    def facts(function):
        return python_state._value_facts(function, [], 0)

    one, other = (lambda value: value * 1.0), (lambda value: value.sin())
    assert facts(one) != facts(other)
    assert facts(times(1.0)) != facts(times(3.0))
    assert facts(times(2.0)) == facts(times(2.0))
