"""Programs with uncommon uses of a model give the same results with remote modules."""

from __future__ import annotations

import copy
import threading
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from gemini.runtime.pool.worker_pool import WorkerPool
from tests.programs.wrapped_models import Net, Program, Wrap, batch, check, step, weights

ELSEWHERE: dict[str, Program] = {}  # units must run in workers
ANYWHERE: dict[str, Program] = {}  # all of it may run in the controller


def program(function: Program) -> Program:
    ELSEWHERE[function.__name__] = function
    return function


def local(function: Program) -> Program:
    ANYWHERE[function.__name__] = function
    return function


def slopes(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


# ── optimizers and gradients ──────────────────────────────────────────────────────────────────────────────────────
class SignDescent(torch.optim.Optimizer):
    """As users write them: no closure, state of its own, writes to `p.data`."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    slow = self.state[p].setdefault("slow", torch.zeros_like(p.data))
                    slow.mul_(0.9).add_(p.grad.data)
                    p.data -= group["lr"] * slow.sign()


@program
def optimizer_of_the_users(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = SignDescent(model.parameters(), 1e-3)
    return [step(model, optimizer) for _ in range(4)], weights(model)


@program
def groups_changed_on_the_way(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.head.parameters(), 0.1)
    seen = [step(model, optimizer) for _ in range(2)]
    optimizer.add_param_group({"params": model.blocks.parameters(), "lr": 0.01, "momentum": 0.9})
    seen += [step(model, optimizer) for _ in range(2)]
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.param_groups[1]["params"].pop()
    return [*seen, *(step(model, optimizer) for _ in range(2))], weights(model)


@program
def averaged_model(wrap: Wrap) -> Any:
    model = wrap(Net())
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(4):
        step(model, optimizer)
        average.update_parameters(model)
    torch.optim.swa_utils.update_bn([batch()[0] for _ in range(3)], average)
    return average(batch()[0]), weights(average), weights(model)


@program
def infinite_gradients(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    scales = []
    for at in range(5):
        x, y = batch()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * (float("inf") if at == 2 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, weights(model)


@program
def gradients_checked_for_none(wrap: Wrap) -> Any:
    model = wrap(Net())
    [model(batch()[0]) for _ in range(3)]
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        model.blocks[0](model.blocks[1](batch()[0])).sum().backward()
    return slopes(model), [p.grad is None for p in model.parameters()], model(batch()[0])


@program
def hooks_on_gradients(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen: dict[str, list[torch.Tensor]] = {}
    for name, p in model.blocks[0].named_parameters():  # in no certain order among parameters
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.setdefault(name, []).append(p.grad.clone()))
    for _ in range(3):
        model(batch()[0]).square().sum().backward()
    return [seen[name] for name in sorted(seen)], slopes(model)


@program
def jacobians(wrap: Wrap) -> Any:
    model = wrap(Net()).eval()
    return [torch.autograd.functional.jacobian(model, torch.randn(2, 16)) for _ in range(3)]


@program
def hessian_vector_products(wrap: Wrap) -> Any:
    model = wrap(Net()).eval()
    scalar = lambda x: model(x).square().sum()
    return [torch.autograd.functional.hvp(scalar, torch.randn(2, 16), torch.randn(2, 16)) for _ in range(3)]


@program
def anomaly_mode(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with torch.autograd.detect_anomaly(check_nan=True):
        return [step(model, optimizer) for _ in range(3)]


@local
def saved_tensors_elsewhere(wrap: Wrap) -> Any:
    model = wrap(Net())
    for _ in range(3):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy() * 2, torch.from_numpy):
            out = model(batch()[0])
        out.sum().backward()
    return slopes(model)


@program
def saved_on_cpu(wrap: Wrap) -> Any:
    model = wrap(Net())
    for _ in range(3):
        with torch.autograd.graph.save_on_cpu():
            out = model(batch()[0])
        out.sum().backward()
    return slopes(model)


@program
def checkpointed_as_a_whole(wrap: Wrap) -> Any:
    model = wrap(Net())
    for _ in range(3):
        checkpoint(model, batch()[0], use_reentrant=False).square().sum().backward()
        x = batch()[0].requires_grad_()
        checkpoint(model, x, use_reentrant=True).square().sum().backward()
    return slopes(model), weights(model)


class Recomputing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.batch(x))


@program
def checkpoints_inside_and_late_backwards(wrap: Wrap) -> Any:
    model = wrap(Recomputing())
    for _ in range(3):
        outputs = [model(batch()[0]) for _ in range(3)]
        sum(out.square().mean() for out in outputs).backward()
    return slopes(model), weights(model)


@program
def gradients_of_outputs(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = []
    for _ in range(3):
        out = model(batch()[0])
        out.retain_grad()
        out.square().sum().backward()
        seen.append(out.grad)
    return seen


@program
def outputs_written_in_place(wrap: Wrap) -> Any:
    model = wrap(Net())
    for _ in range(3):
        out = model(batch()[0])
        out.mul_(2).add_(1)
        out[0].zero_()
        out.relu_().sum().backward()
    return slopes(model)


# ── hooks and modules ─────────────────────────────────────────────────────────────────────────────────────────────
@program
def hooks_with_keywords(wrap: Wrap) -> Any:
    model = wrap(Keywords())
    seen: list[Any] = []
    inner = model.layers[1]
    inner.register_forward_pre_hook(lambda _, a, k: (a, {**k, "scale": 3.0}), with_kwargs=True)
    inner.register_forward_hook(lambda _, a, k, out: seen.append((k["scale"], out.detach().clone())), with_kwargs=True)
    model.layers[2].register_forward_hook(lambda *_: None, always_call=True)
    for _ in range(3):
        model(torch.randn(4, 8)).sum().backward()
    return seen, slopes(model)


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for at, layer in enumerate(self.layers):
            x = layer(x, scale=float(at + 1))
        return x


@program
def weights_in_other_memory(wrap: Wrap) -> Any:
    model = wrap(nn.Sequential(nn.Linear(16, 16), nn.GELU(), Bounded(16, 16), nn.GELU(), nn.Linear(16, 5)))
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    return [step(model, optimizer) for _ in range(4)], weights(model)


class Bounded(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.25)
        return super().forward(x)


@program
def backward_hooks(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen: list[Any] = []
    model.blocks[1].register_full_backward_hook(lambda _, gi, go: seen.append((gi[0].clone(), go[0].clone())))
    model.blocks[2].up.register_full_backward_hook(lambda _, gi, go: seen.append(go[0].clone()))
    model.blocks[3].register_full_backward_pre_hook(lambda _, go: (go[0] * 2,))
    handle = model.blocks[0].register_full_backward_hook(lambda _, gi, go: seen.append(go[0].clone()))
    for at in range(4):
        if at == 2:
            handle.remove()
        model(batch()[0].requires_grad_()).square().sum().backward()
    return seen, slopes(model)


@program
def weights_tied_later(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = [step(model, optimizer) for _ in range(3)]
    model.blocks[3].up.weight = model.blocks[0].up.weight
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [*seen, *(step(model, optimizer) for _ in range(3))], weights(model), len(list(model.parameters()))


@program
def modules_added_later(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = [model(batch()[0]) for _ in range(3)]
    model.blocks.insert(1, nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
    del model.blocks[3]
    torch.nn.utils.parametrizations.weight_norm(model.head)
    prune.random_unstructured(model.blocks[0].up, "weight", 0.5)
    return [*seen, *(model(batch()[0]) for _ in range(3))], weights(model)


@program
def nested_managed_models(wrap: Wrap) -> Any:
    inner = wrap(Net(16, 16))
    outer = wrap(nn.Sequential(nn.Linear(16, 16), inner, nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5)))
    optimizer = torch.optim.SGD(outer.parameters(), 0.1)
    seen: list[Any] = []
    for _ in range(4):
        seen += [step(outer, optimizer), inner(batch()[0]).detach().clone()]
    return seen, weights(outer)


@program
def generator_of_a_module(wrap: Wrap) -> Any:
    model = wrap(Noisy())
    return [model(torch.randn(4, 8)) for _ in range(4)], [layer.source.initial_seed() for layer in model.layers[::2]]


class Noise(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.source = torch.Generator().manual_seed(seed)
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gain * torch.rand(x.shape, generator=self.source)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Noise(1), nn.Linear(8, 8), Noise(2), nn.Linear(8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@program
def generators_as_arguments(wrap: Wrap) -> Any:
    model = wrap(Drawing())
    seen = []
    source, numbers = torch.Generator().manual_seed(1), np.random.default_rng(1)
    for _ in range(4):
        seen.append(model(torch.randn(4, 8), source, numbers))
    return seen, torch.rand(3, generator=source), numbers.random()


class DrawingLayer(nn.Linear):
    def forward(self, x: torch.Tensor, source: Any, numbers: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) + torch.rand(8, generator=source) + float(numbers.random())


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DrawingLayer(8, 8), nn.Linear(8, 8), DrawingLayer(8, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor, source: Any, numbers: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, source, numbers) if isinstance(layer, DrawingLayer) else layer(x)
        return x


# ── inputs and outputs ────────────────────────────────────────────────────────────────────────────────────────────
class Mixed(nn.Module):
    """Takes numbers and arrays, returns views of what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Part() for _ in range(4))

    def forward(self, x: torch.Tensor, number: Any, array: np.ndarray) -> Any:
        views = []
        for part in self.parts:
            x, view = part(x, number, array)
            views.append(view)
        return x, views


class Part(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: torch.Tensor, number: Any, array: np.ndarray) -> Any:  # type: ignore[override]
        return super().forward(x) * number + torch.from_numpy(array), x[:, :2]


@program
def numbers_and_arrays(wrap: Wrap) -> Any:
    model = wrap(Mixed())
    seen = []
    for number in (2, 0.5, np.float32(1.5), True):
        seen.append(model(torch.randn(4, 8), number, np.ones(8, dtype=np.float32)))
    return seen


@program
def views_of_inputs(wrap: Wrap) -> Any:
    model = wrap(Mixed())
    for _ in range(3):
        x, views = model(torch.randn(4, 8), 1, np.ones(8, dtype=np.float32))
        (x.sum() + sum(view.square().sum() for view in views)).backward()
    return slopes(model)


@program
def odd_memory(wrap: Wrap) -> Any:
    model = wrap(Net())
    wide = torch.randn(16, 24)
    inputs = [
        wide.T[::2],
        wide.T[:12],
        torch.randn(1, 16).expand(12, 16),
        wide.T[::2].flip(0),
        wide.T[::2].contiguous(),
    ]
    return [model(x) for x in (inputs[0], *inputs)]


@program
def other_sizes_every_step(wrap: Wrap) -> Any:
    model = wrap(Net().eval())
    seen = []
    for size in (12, 3, 40, 1, 0, 7):
        out = model(torch.randn(size, 16))
        out.sum().backward()
        seen += [out, *slopes(model)]
    return seen


@program
def channels_last(wrap: Wrap) -> Any:
    layers = [part for width in (3, 8, 8, 8) for part in (nn.Conv2d(width, 8, 3, padding=1), nn.BatchNorm2d(8))]
    model = wrap(nn.Sequential(*layers))
    seen = []
    for at in range(5):
        if at == 2:
            model.to(memory_format=torch.channels_last)
        out = model(
            torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last if at > 3 else torch.contiguous_format)
        )
        out.sum().backward()
        seen += [out, list(out.stride())]
    return seen, slopes(model), weights(model)


@program
def without_and_with_gradients(wrap: Wrap) -> Any:
    model = wrap(Net())
    with torch.no_grad():
        seen = [model(batch()[0]) for _ in range(3)]
    out = model(batch()[0])
    out.sum().backward()
    with torch.inference_mode():
        seen.append(model(batch()[0]).clone())
    return seen, out, slopes(model), out.requires_grad


@program
def double_precision(wrap: Wrap) -> Any:
    model = wrap(Net().double())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for _ in range(4):
        optimizer.zero_grad()
        model(batch()[0].double()).square().mean().backward()
        optimizer.step()
    return weights(model)


@program
def another_default_precision(wrap: Wrap) -> Any:
    model = wrap(nn.Sequential(*(Ones() for _ in range(4))))
    x = torch.randn(2, 8)
    seen = [model(x).dtype for _ in range(3)]
    torch.set_default_dtype(torch.float64)
    try:
        seen += [model(x).dtype for _ in range(2)]
    finally:
        torch.set_default_dtype(torch.float32)
    return seen


class Ones(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain + torch.ones(8)


# ── threads ───────────────────────────────────────────────────────────────────────────────────────────────────────
def in_thread(work: Any) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join()
    return found[0]


@program
def called_from_another_thread(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [in_thread(lambda: step(model, optimizer)) for _ in range(4)], weights(model)


@program
def called_from_several_threads(wrap: Wrap) -> Any:
    model = wrap(Net().eval())
    inputs = torch.randn(6, 12, 16)
    outputs: list[Any] = [model(inputs[0]), model(inputs[0])]
    results: list[Any] = [None] * 6

    def work(at: int) -> None:
        for _ in range(5):
            out = model(inputs[at])
            results[at] = (out.detach(), torch.autograd.grad(out.square().sum(), list(model.parameters())))

    threads = [threading.Thread(target=work, args=(at,)) for at in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    return outputs, results


# ── what other parts of torch do with a model ─────────────────────────────────────────────────────────────────────
@local
def functional_calls(wrap: Wrap) -> Any:
    model = wrap(Net())
    seen = []
    for at in range(4):
        other = {name: torch.full_like(p, 0.01 * at) for name, p in model.named_parameters()}
        seen += [torch.func.functional_call(model, other, (batch()[0],)), model(batch()[0])]
    return seen


@program
def derivatives_of_calls_with_computed_weights(wrap: Wrap) -> Any:
    model = wrap(Net())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    for at in range(4):
        x, y = batch()
        values = dict(model.named_parameters())
        for _ in range(1 + at % 2):
            loss = F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)
            changes = torch.autograd.grad(loss, values.values(), create_graph=True)
            values = {name: p - 0.1 * change for (name, p), change in zip(values.items(), changes, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(model, values, (x,)), y)
        optimizer.zero_grad()
        outer.backward()
        optimizer.step()
        seen += [loss.item(), outer.item(), step(model, optimizer)]
    return seen, weights(model)


@local
def function_transforms(wrap: Wrap) -> Any:
    model = wrap(Net()).eval()
    model(batch()[0]), model(batch()[0])
    values = {name: p.detach() for name, p in model.named_parameters()}
    buffers = dict(model.named_buffers())

    def loss(values: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(model, (values, buffers), (x[None],)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(values, torch.randn(3, 16))
    return list(each.values()), torch.func.vmap(model)(torch.randn(3, 2, 16)), model(batch()[0])


@local
def forward_mode(wrap: Wrap) -> Any:
    model = wrap(Net()).eval()
    model(batch()[0]), model(batch()[0])
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(torch.randn(4, 16), torch.ones(4, 16))
        tangent = torch.autograd.forward_ad.unpack_dual(model(dual)).tangent
    return torch.func.jvp(model, (torch.randn(4, 16),), (torch.ones(4, 16),)), tangent, model(batch()[0])


@local
def traced_and_exported(wrap: Wrap) -> Any:
    model = wrap(Net()).eval()
    x = batch()[0]
    seen = [model(x), model(x)]
    traced = torch.jit.trace(model, (x,))
    exported = torch.export.export(model, (x,))
    return [*seen, traced(x), exported.module()(x), model(x)]


@local
def symbolically_traced(wrap: Wrap) -> Any:
    model = wrap(Net()).eval()
    x = batch()[0]
    seen = [model(x), model(x)]
    return [*seen, torch.fx.symbolic_trace(model)(x), model(x)]


@local
def compiled_by_torch(wrap: Wrap) -> Any:
    model = wrap(Net())
    fast = torch.compile(model, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return [step(fast, optimizer) for _ in range(3)], weights(model)


@program
def data_parallel_without_devices(wrap: Wrap) -> Any:
    model = wrap(Net())
    outer = nn.DataParallel(model)
    optimizer = torch.optim.SGD(outer.parameters(), 0.1)
    return [step(outer, optimizer) for _ in range(3)], weights(copy.deepcopy(model))


@program
def meta_and_fake_inputs(wrap: Wrap) -> Any:
    model = wrap(Net()).eval()
    seen = [model(batch()[0]) for _ in range(3)]
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        shape = list(model(mode.from_tensor(batch()[0])).shape)
    return seen, shape, model(batch()[0])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*ELSEWHERE, *ANYWHERE])
@pytest.mark.filterwarnings("ignore")
def test_a_program_gives_what_it_gives_on_one_device(name: str, pool: WorkerPool) -> None:
    check({**ELSEWHERE, **ANYWHERE}[name], pool, elsewhere=name in ELSEWHERE)
