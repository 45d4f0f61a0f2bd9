"""Values across and inside stages: shared containers, mutated arguments, numbers, long skips, guards."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from gemini.capture import capture
from gemini.codegen import generate_stages, interfaces
from gemini.ir.interpreter import GuardBroken
from gemini.ir.pytree import Ref
from tests.codegen.cutting import Sequential, copied, cut, even_cut, flat_problem, load
from tests.codegen.test_stage_equivalence import differences


class Filling(nn.Module):
    """Changes the containers it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, seen, cache):
        y = self.lin(x)
        if bool((y > 1e9).any()):  # Python that branches: kept whole
            y = -y
        seen.append(y * 2)
        cache["last"] = y + 1
        return y


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Filling(), Filling()

    def forward(self, x):
        seen, cache = [x], {}
        x = self.one(x, seen, cache)
        x = self.two(x, seen, cache)
        return OrderedDict(out=x, seen=tuple(seen), last=cache["last"])


class Twice(nn.Module):
    """One container given twice, as positional and keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.block = TwiceInner()
        self.last = nn.Linear(4, 4)

    def forward(self, x):
        pair = [x, x * 2]
        return self.last(self.block(pair, pair, extra={"a": pair, "b": pair}))


class TwiceInner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, one, two, extra):
        if one is not two or extra["a"] is not extra["b"]:
            raise ValueError("a container has been copied")
        y = self.lin(one[0] + two[1] + extra["a"][0])
        if bool((y > 1e9).any()):
            return one[0]
        return y


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        y = torch.zeros_like(x).T.contiguous().T
        y[:, 0] = self.a(x)[:, 1]
        y[..., 1:3] += x[..., 1:3]
        self.count.add_(1)
        z = self.b(y).mul_(2)
        z[0] = 5.0
        return z + self.count, y.mT


class Skips(nn.Module):
    """A value for a distant stage, a result of the first stage, an input as result, sizes of a far tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x, scale):
        first = self.layers[0](x)
        y = self.layers[1](torch.relu(first))
        y = self.layers[2](y).reshape(x.shape[0] * 2, x.shape[1] // 2)
        y = y.reshape(first.shape[0], -1) * scale + first
        return self.layers[3](y), first.mean(), scale, {"size": x.shape[0], "none": None}


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()) for _ in range(2))
        self.last = nn.Linear(4, 2)

    def forward(self, x):
        x = checkpoint(self.one, x, use_reentrant=False)
        x = checkpoint(self.two, x, use_reentrant=True)
        return self.last(x)


class Regions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        with torch.no_grad():
            target = self.a(x).tanh()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.b(x)
            with torch.autocast("cpu", enabled=False):
                z = self.c(y.float())
            y = y * 2
        return ((z + y.float()) - target) ** 2


class Accumulating(nn.Module):
    """Layers that add to one tensor in place, which is read after them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)) for _ in range(5))

    def forward(self, x):
        total = self.layers[0](x)
        for layer in self.layers[1:]:
            total += layer(x)
        return total / 5


def x(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, requires_grad=True)


MODELS = {
    "containers": (Containers, (x(3, 4),)),
    "twice": (Twice, (x(3, 4),)),
    "in place": (InPlace, (x(3, 4),)),
    "skips": (Skips, (x(3, 6), torch.ones(3, 1))),
    "checkpointed": (Checkpointed, (x(3, 4),)),
    "accumulating": (Accumulating, (x(3, 4),)),
    "regions": (Regions, (x(3, 4),)),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_cut_in_two_equals_the_model(name):
    make, args = MODELS[name]
    torch.manual_seed(1)
    graph = capture(make().train(), args)
    assert not graph.is_whole
    problem = flat_problem(graph, 2)
    count = len(problem.items)
    for place in range(count):
        partition = cut(graph, problem, [int(at >= place) if place else 0 for at in range(count)])
        assert differences(graph, partition, args, {}, copied) == [], place


def test_values_go_directly_to_the_stages_that_read_them():
    make, args = MODELS["skips"]
    graph = capture(make(), args)
    ports = {port.name: port for one in interfaces(graph, even_cut(graph, 8)) for port in (*one.inputs, *one.outputs)}
    assert ports["x"].source is None
    first = ports["first"]
    assert first.source == 0
    assert len(first.targets) > 1
    assert max(first.targets) - first.source > 1
    sizes = [port for port in ports.values() if not isinstance(port.value, Ref)]
    assert sizes
    assert all(port.meta is None for port in sizes)
    results = [port for port in ports.values() if port.is_result]
    assert len({port.source for port in results}) > 1


def test_interfaces_fit_together():
    make, args = MODELS["skips"]
    graph = capture(make(), args)
    for nstages in (2, 3, 5, 9):
        made = interfaces(graph, even_cut(graph, nstages))
        for one in made:
            assert len({port.name for port in one.inputs}) == len(one.inputs)
            for port in one.inputs:
                assert port.source is None or port in made[port.source].outputs
            for port in one.outputs:
                assert port.is_result or port.targets
                assert all(port in made[target].inputs for target in port.targets)
                assert all(target > one.stage for target in port.targets)


class Whimsical(nn.Module):
    """Returns something else for large values."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x):
        y = self.lin(x)
        if bool((y.abs() > 50).any()):
            return y, y
        return y, None


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Whimsical(), nn.Linear(4, 4)

    def forward(self, x):
        y, _ = self.block(x)
        return self.last(y)


class Branching(nn.Module):
    """Its glue depends on the number of samples."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        x = self.a(x)
        if x.shape[0] > 5:
            x = x * 2
        return self.b(x)


def test_another_structure_breaks_a_guard():
    graph = capture(Wrapped(), (torch.randn(3, 4),))
    stages = Sequential(graph, generate_stages(graph, even_cut(graph, 2)))
    with pytest.raises(GuardBroken, match=r"returned tuple\(T,T\), not tuple\(T,None\)"):
        stages(torch.full((3, 4), 200.0))


def test_another_number_of_samples_breaks_a_guard_where_it_matters():
    graph = capture(Branching(), (torch.randn(4, 4),))
    stages = Sequential(graph, generate_stages(graph, even_cut(graph, 2)))
    assert torch.equal(stages(torch.ones(2, 4)), graph.bound_model()(torch.ones(2, 4)))
    if graph.validity.batch:
        with pytest.raises(GuardBroken, match="shape"):
            stages(torch.ones(8, 4))


class Counting(nn.Module):
    """Changes an attribute of itself: it can only be kept whole."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.lin = 0, nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        self.calls += 1
        return {"y": self.lin(x) * self.scale, "calls": self.calls}


def test_a_model_that_is_kept_whole_is_one_stage():
    model = Counting()
    graph = capture(model, (torch.ones(3, 4),))
    assert graph.is_whole
    (code,) = generate_stages(graph, even_cut(graph, 1))
    stage = load(code, model)
    before = model.calls
    found = stage(*(torch.ones(3, 4) for _ in code.interface.inputs))
    assert torch.equal(found, model.lin(torch.ones(3, 4)))
    assert model.calls == before + 1
    assert set(code.parameters) == {"scale", "lin.weight", "lin.bias"}
    assert set(stage.state_dict()) == set(model.state_dict())


def test_results_of_inner_modules_are_collected():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=3, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.randint(0, 32, (4, 6))
    kwargs = {"input_ids": tokens, "labels": tokens, "use_cache": False, "output_hidden_states": True}
    graph = capture(model, (), kwargs, basic_blocks=("LlamaModel",))
    for partition in (even_cut(graph, 1), even_cut(graph, 2)):
        assert differences(graph, partition, (), kwargs) == []
