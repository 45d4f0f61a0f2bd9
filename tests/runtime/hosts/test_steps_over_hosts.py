"""Planned steps over hosts, and replicas, train as one device does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini import GeminiConfig
from gemini.planner.config_planner import planner_for
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.remote_worker import RemoteWorker
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import get_journal
from tests.runtime.hosts.local_host import CPU, loopback_pool


class Net(nn.Module):
    """Tied weights, dropout, and a loss whose denominator depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 32)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, 32)) for _ in range(4)]
        )
        self.head = nn.Linear(32, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train(model: nn.Module, steps: int = 6) -> list[torch.Tensor]:
    """Losses, gradients, random numbers and weights."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    seen: list[torch.Tensor] = []
    for step in range(steps):
        tokens = torch.randint(11, (9, 5))
        wanted = torch.where(torch.rand(9, 5) < 0.3, -100, tokens)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), wanted.flatten(), ignore_index=-100)
        loss.backward()
        seen += [loss.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None], torch.rand(1)]
        optimizer.step()
        if step == 3:
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
    return [*seen, *[p.detach().clone() for p in model.parameters()]]


def make() -> Net:
    torch.manual_seed(0)
    return Net().double()


def manage(model: nn.Module, pool: WorkerPool, tmp_path: Any, **settings: Any) -> ManagedModel:
    config = GeminiConfig(quiet=True, strict=True, **settings)
    planner = planner_for(config)
    assert planner is not None
    known = ManagedModel(model, pool, True, config.accum_degree or 1, True)
    known.record.folder = tmp_path / "failures"
    journal = known.journal = get_journal(tmp_path, True).add_model(known.name, len(pool.workers))
    known.pipelined = PipelinedModel(known, planner, journal, None)
    known.dispatches, known.replicates = False, config.data_parallel == "replicated"
    dispatch.manage(model, known)
    return known


@pytest.fixture(scope="module", params=["one of two", pytest.param("both", marks=pytest.mark.slow)])
def pool(request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    made = loopback_pool(["cpu", CPU] if request.param == "one of two" else [CPU, CPU])
    yield made
    made.stop()


@pytest.fixture(scope="module")
def replicated_pool() -> Iterator[WorkerPool]:
    made = loopback_pool(["cpu", CPU])
    yield made
    made.stop()


@pytest.fixture(scope="module")
def local_pool() -> Iterator[WorkerPool]:
    made = loopback_pool(["cpu", "cpu"])
    yield made
    made.stop()


@pytest.mark.parametrize(
    "settings",
    [
        {"pipeline_degree": 2, "accum_degree": 3, "schedule": "1f1b"},
        {"replicas": 2, "accum_degree": 2},
        {"replicas": 2, "accum_degree": 4},
        {"pipeline_degree": 2, "accum_degree": 4, "schedule": "chimera"},
        {"mode": "sharding", "sharding_size": 2},
    ],
    ids=["stages", "replicas", "replicas of several micro-batches", "chimera", "shards"],
)
def test_steps_equal_those_of_one_device(settings: dict[str, Any], pool: WorkerPool, tmp_path: Any) -> None:
    expected = train(make())
    model = make()
    known = manage(model, pool, tmp_path, **settings)
    found = train(model)
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
    assert known.pipelined is not None
    assert known.pipelined.steps >= 4


def test_two_replicas_equal_two_micro_batches_bit_for_bit(
    pool: WorkerPool, local_pool: WorkerPool, tmp_path: Any
) -> None:
    """The same steps by one worker, one micro-batch after the other."""
    found = []
    for workers in (pool, local_pool):
        model = make().float()
        name = "replicas" if workers is pool else "one"
        manage(model, workers, tmp_path / name, replicas=2, accum_degree=2)
        found.append(train(model))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def train_replicated(model: nn.Module, kind: str, steps: int = 8) -> list[torch.Tensor]:
    """A script that clips, changes gradients or weights, or takes another optimizer; losses, weights, its state."""
    torch.manual_seed(1)
    parameters = list(model.parameters())
    made: dict[str, Any] = {"momentum": {"lr": 1e-2, "momentum": 0.9}, "adam": {"lr": 1e-2}}
    optimizer: Any = (
        torch.optim.SGD(parameters, **made["momentum"])
        if kind == "momentum"
        else torch.optim.LBFGS(parameters, max_iter=1)
        if kind == "closure"
        else torch.optim.AdamW([{"params": parameters[:3]}, {"params": parameters[3:], "lr": 3e-3}], weight_decay=0.1)
    )
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    seen: list[torch.Tensor] = []
    for step in range(steps):
        tokens = torch.randint(11, (9, 5))

        def compute(tokens: torch.Tensor = tokens) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            seen.append(loss.detach())
            return loss

        if kind == "closure":
            optimizer.step(compute)
            continue
        compute()
        if kind == "clipped":
            nn.utils.clip_grad_norm_(parameters, 0.05)
        if kind == "changed gradients" and step % 2:
            parameters[1].grad.data.mul_(0.5)  # type: ignore[union-attr]
        optimizer.step()
        scheduler.step()
        if kind == "changed weights" and step in (3, 4):
            model.load_state_dict({name: value * 0.9 for name, value in model.state_dict().items()})
        if kind == "restored" and step == 4:
            optimizer.load_state_dict(optimizer.state_dict())
            next(iter(optimizer.state.values()))["exp_avg"].zero_()
    state = [value for one in optimizer.state.values() for value in one.values() if isinstance(value, torch.Tensor)]
    return [*seen, *state, *[p.detach().clone() for p in parameters]]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "limits"),  # transfers of weights at most, repeated steps at least
    [
        ("adam", (1, 5)),
        ("clipped", (1, 5)),
        pytest.param("momentum", (1, 5), marks=pytest.mark.slow),
        ("changed gradients", (8, 1)),
        pytest.param("changed weights", (4, 5), marks=pytest.mark.slow),
        ("restored", (2, 5)),
        ("closure", (8, 0)),
    ],
)
def test_hosts_that_optimize_their_own_weights_compute_the_same(
    kind: str, limits: tuple[int, int], local_pool: WorkerPool, replicated_pool: WorkerPool, tmp_path: Any
) -> None:
    sent, repeated = list[Any](), list[Any]()
    (remote,) = [worker for worker in replicated_pool.workers if isinstance(worker, RemoteWorker)]
    with pytest.MonkeyPatch.context() as patch:
        write, update = remote._write, remote.update_weights
        patch.setattr(remote, "_write", lambda module, places: write(module, places) or sent.extend(places[:1]))
        patch.setattr(remote, "update_weights", lambda request: update(request) or repeated.append(request))
        found = []
        for workers in (replicated_pool, local_pool):
            model = make().float()
            settings = {"data_parallel": "replicated"} if workers is replicated_pool else {}
            manage(model, workers, tmp_path / str(len(found)), replicas=2, accum_degree=2, **settings)
            found.append(train_replicated(model, kind))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert len(sent) <= limits[0]
    assert len(repeated) >= limits[1]


class Wide(nn.Module):
    """Gradients that fill buckets; one layer is used twice, the gradient of one is zero in every second step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1100, 1100) for _ in range(3))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first, second, third = self.layers
        x = self.dropout(torch.relu(first(x)))
        return second(torch.relu(second(x))) + weight.mean() * third(x)


def test_gradients_that_leave_during_the_backward_are_those_of_the_step(
    pool: WorkerPool, local_pool: WorkerPool, tmp_path: Any
) -> None:
    received: list[int] = []
    takes = {worker: worker.pop_gradients for worker in pool.workers if worker.is_remote}
    found = []
    for workers in (pool, local_pool):
        torch.manual_seed(0)
        model = Wide()
        manage(model, workers, tmp_path / str(len(found)), replicas=2, accum_degree=2)
        optimizer, seen = torch.optim.SGD(model.parameters(), 0.1), list[torch.Tensor]()
        for worker, take in takes.items() if workers is pool else ():
            worker.pop_gradients = lambda step, take=take: received.append(len(bucket := take(step))) or bucket  # type: ignore[func-returns-value]
        for step in range(6):
            loss = model(torch.randn(4, 1100), torch.full((4,), float(step % 2))).square().mean()
            optimizer.zero_grad()
            loss.backward()
            seen += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
            optimizer.step()
        found.append(seen)
    for worker in takes:
        del worker.pop_gradients
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert max(received) >= 4


def test_an_exception_in_a_stage_undoes_the_step(pool: WorkerPool, tmp_path: Any) -> None:
    model = make()
    manage(model, pool, tmp_path, replicas=2, accum_degree=2)
    train(model)
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(IndexError):
        F.cross_entropy(model(torch.full((9, 5), 99)).flatten(0, 1), torch.zeros(45).long()).backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    expected, found = make(), model
    found.load_state_dict(expected.state_dict())
    for one, other in zip(train(expected), train(found), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)
