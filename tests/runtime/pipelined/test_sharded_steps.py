"""Steps on shards equal those of one device: losses, gradients and weights, with dropout."""

import copy
import os
import signal
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import gemini
from gemini import GeminiConfig
from gemini.capture import entry
from gemini.errors import GeminiError, WorkerError
from gemini.runtime.interception import dispatch
from gemini.schedule.composer import Composer
from gemini.schedule.placements import placement

SHARDS = {"mode": "sharding", "sharding_size": 2}
HYBRID = {"mode": "hybrid", "pipeline_degree": 2, "sharding_size": 2, "accum_degree": 4}
CONFIGS = [
    SHARDS,
    {**SHARDS, "sharding_dim": 0},
    HYBRID,
    *(pytest.param({**SHARDS, **more}, marks=pytest.mark.slow) for more in ({"accum_degree": 4}, {"sharding_size": 4})),
]


class Mixer(nn.Module):
    """Layers whose weights divide by rows and columns, a divided vocabulary, heads, dropout and a written buffer."""

    def __init__(self, vocabulary: int = 24, width: int = 16, norm: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 32), nn.Linear(32, width)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(()))
        self.bn = nn.BatchNorm1d(width) if norm else None

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        q, k, v = (layer(x).view(*ids.shape, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = self.norm(x + self.drop(self.o(mixed.transpose(1, 2).flatten(2))))
        if self.bn is not None:
            x = self.bn(x.flatten(0, 1)).view_as(x)
        if self.training:
            self.seen += 1
        return self.head(x + self.drop(self.down(F.gelu(self.up(x)))))


class Checkpointed(Mixer):
    """Attention, and the layers after it, in activation checkpoints."""

    def __init__(self, **options) -> None:
        super().__init__(**options)
        self.more = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16))
                                  for _ in range(4))  # fmt: skip

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        def attend(x: torch.Tensor) -> torch.Tensor:
            q, k, v = (layer(x).view(*ids.shape, 4, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
            mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
            return self.norm(x + self.drop(self.o(mixed.transpose(1, 2).flatten(2))))

        x = checkpoint(attend, self.embed(ids), use_reentrant=False)
        for layer in self.more:
            x = x + checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


def train(model, steps=4, config=None, make=torch.optim.AdamW, clip=0.0):
    """Losses of some steps, the last gradients, and the state."""
    if config is not None:
        gemini.compile(model, GeminiConfig(**config, strict=True))
    torch.manual_seed(3)
    optimizer, losses = make(model.parameters(), 1e-2), []
    for _ in range(steps):
        ids = torch.randint(24, (8, 6))
        loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        if clip:
            losses.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        losses.append(loss.item())
    return losses, {key: one.clone() for key, one in model.state_dict().items()}, float(torch.rand(()))


def build(**options):
    torch.manual_seed(0)
    return Mixer(**options).double()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_training_equals_one_device(config):
    wanted = train(build(), clip=0.5)
    model = build()
    found = train(model, config=config, clip=0.5)
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-11, msg=key)
    assert found[2] == wanted[2]  # the generator is where one device leaves it
    plan = dispatch.find_managed(model).journal.plan
    assert f"{config['sharding_size']} shards" in plan


@pytest.mark.parametrize(
    "name",
    ["mllm", *(pytest.param(one, marks=pytest.mark.slow) for one in ("mshape", "kshape", "nnshape", "nnshape_eager"))],
)
def test_blocks_on_several_workers_run_on_shards(name, tmp_path):
    """Stages that all workers run together are divided; the others are on one worker each. A weight is in both."""
    plan = Composer.compose(placement(name, ndevs=2), memory=8).unroll(4)
    config = {
        "mode": "hybrid",
        "pipeline_degree": 2,
        "accum_degree": 4,
        "schedule": str(plan.save(tmp_path / "p.json")),
    }
    wanted, model = train(build()), build()
    found = train(model, config=config)
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-11, msg=key)
    assert found[2] == wanted[2]
    assert "some of 2 shards" in dispatch.find_managed(model).journal.plan


@pytest.mark.parametrize("config", [{**SHARDS, "accum_degree": 2}, pytest.param(HYBRID, marks=pytest.mark.slow)],
                         ids=str)  # fmt: skip
def test_checkpoints_are_divided_and_recomputed(config):
    """Their insides are divided, and run again in backward with the same masks and collectives."""
    torch.manual_seed(0)
    model = Checkpointed().double()
    wanted = train(copy.deepcopy(model))
    found = train(model, config=config)
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-11, msg=key)
    assert found[2] == wanted[2]
    plan = dispatch.find_managed(model).journal.plan
    assert float(plan.partition("% of parameter")[0].rpartition(" ")[2]) > 90
    source = "".join(sources_of(model))
    assert source.count("= checkpoint(recomputed, ") >= 2
    assert "move(" in source.partition("def recomputed(")[2].partition("return")[0]


def sources_of(model):
    """The generated stages of the plan of a model."""
    (kind,) = [kind for kinds in dispatch.find_managed(model).pipelined.plans.kinds.values() for kind in kinds]
    return kind.plan.build(kind.shares).sources.values()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("config", [HYBRID, pytest.param({**SHARDS, "accum_degree": 4}, marks=pytest.mark.slow)],
                         ids=str)  # fmt: skip
def test_losses_over_the_whole_batch(config):
    """Samples are compared in the loss, which all shards of the last stage compute after all forwards."""
    results = []
    for settings in (None, config):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 32), nn.Tanh(),
                              nn.Linear(32, 16)).double()  # fmt: skip
        if settings is not None:
            gemini.compile(model, GeminiConfig(**settings, strict=True))
        torch.manual_seed(3)
        for _ in range(4):
            model.zero_grad()
            made = model(torch.randn(8, 8).double())
            loss = torch.cdist(made, made).mean() + made.std(0).mean()
            loss.backward()
        results.append([loss.detach(), *(one.grad for one in model.parameters())])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-10, atol=1e-12)
    plan = dispatch.find_managed(model).journal.plan
    assert "2 shards" in plan
    assert "the loss on the whole batch" in plan


@pytest.mark.slow
def test_recurrent_layers_follow_the_optimizer():
    """A recurrent layer lists its weights twice: both are those of the shard."""
    results = []
    for settings in (None, HYBRID):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), Last(nn.GRU(12, 10, batch_first=True)), nn.Linear(10, 4))
        model.double()
        if settings is not None:
            gemini.compile(model, GeminiConfig(**settings, strict=True))
        torch.manual_seed(3)
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
        for _ in range(6):
            loss = model(torch.randn(8, 5, 6).double()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-10)
    assert dispatch.find_managed(model).journal.steps["overlapped"] == 4


class Last(nn.Module):
    """The last step of a recurrent layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)[0][:, -1]


LENGTHS = (12, 9, 17, 6, 21, 10, 14, 7, 16, 23, 11, 13)
SAMPLES = (8, 8, 7, 8, 5, 8, 6, 8, 9, 8, 7, 8)


@pytest.mark.parametrize("config", [SHARDS, pytest.param(HYBRID, marks=pytest.mark.slow)], ids=str)
def test_one_plan_serves_all_lengths(config, monkeypatch):
    """A new length in every step, and another number of samples: two captures, then the same installed stages."""
    captures = []
    once = entry._capture_once
    monkeypatch.setattr(entry, "_capture_once", lambda *given: captures.append(1) or once(*given))
    results = []
    for settings in (None, config):
        model = build()
        if settings is not None:
            gemini.compile(model, GeminiConfig(**settings, strict=True))
        torch.manual_seed(3)
        optimizer, losses = torch.optim.AdamW(model.parameters(), 1e-2), []
        for length, samples in zip(LENGTHS, SAMPLES, strict=True):
            ids = torch.randint(24, (samples, length))
            loss = F.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        results.append(losses)
    assert results[1] == pytest.approx(results[0], rel=1e-9)
    assert len(captures) <= 2
    assert dispatch.find_managed(model).journal.steps["overlapped"] >= 9


def test_scopes_are_overridden():
    model = build()
    train(model, config={**SHARDS, "sharding_overrides": {"up": "replicate", "down": "replicate"}})
    part = float(dispatch.find_managed(model).journal.plan.partition("% of parameter")[0].rpartition(" ")[2])
    assert part < 70  # percent; without overrides nearly all
    with pytest.raises(GeminiError, match=r"(?s)no scope 'upp'.*did you mean 'up'"):
        gemini.compile(build(), GeminiConfig(**SHARDS, sharding_overrides="upp=replicate"))


def test_buffers_are_written_once():
    """Batch normalization in training: statistics of the batch, running averages in shared memory."""
    wanted, model = train(build(norm=True)), build(norm=True)
    found = train(model, config=SHARDS)
    assert found[0] == pytest.approx(wanted[0], rel=1e-10)
    for key, value in wanted[1].items():
        torch.testing.assert_close(found[1][key], value, rtol=1e-9, atol=1e-11, msg=key)


def test_kept_gradients_are_not_overwritten():
    model = build()
    gemini.compile(model, GeminiConfig(**SHARDS, strict=True))
    kept = []
    for _ in range(5):
        ids = torch.randint(24, (8, 6))
        model.zero_grad()
        F.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        kept.append((model.up.weight.grad, model.up.weight.grad.clone()))
    assert all(torch.equal(grad, copy) for grad, copy in kept)


def test_an_error_of_the_model_is_that_of_one_device():
    model = build()
    gemini.compile(model, GeminiConfig(**SHARDS, quiet=True))
    for _ in range(3):
        model(torch.randint(24, (8, 6))).sum().backward()
    with pytest.raises(IndexError):
        model(torch.full((8, 6), 99)).sum().backward()
    before = train(build())[0]
    assert train(model, config=None)[0] != before  # it still trains


def test_a_killed_shard_ends_the_step_at_once():
    model = build()
    gemini.compile(model, GeminiConfig(**SHARDS, quiet=True, strict=True))
    for _ in range(3):
        model(torch.randint(24, (8, 6))).sum().backward()
    pool = dispatch.find_managed(model).pool
    processes = [worker.process for worker in pool.workers]
    os.kill(processes[1].pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(WorkerError):
        model(torch.randint(24, (8, 6))).sum().backward()
    assert time.monotonic() - began < 10
    pool.stop()
    assert all(process.poll() is not None for process in processes)
