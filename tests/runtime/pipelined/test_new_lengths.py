"""A new length in each of 12 steps: the numbers of one device, two captures, overlapped from the third length on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import gemini
from gemini import GeminiConfig
from gemini.capture import driver
from gemini.runtime.interception import dispatch
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import ModelJournal
from tests.programs.pipelined_runs import manage

WORDS = 50
LENGTHS = (16, 16, 12, 20, 22, 14, 30, 9, 18, 26, 11, 36, 40)  # the first twice: the first call is not planned
SAMPLES = (8, 8, 8, 8, 6, 8, 9, 12, 8, 5, 8, 4, 16)


class Case(NamedTuple):
    """A model, and the loss of a step with a number of samples of a length."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, int, int], torch.Tensor]


class Decoder(nn.Module):
    """A language model with dropout and a mask that is made from the length."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 16), nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(2))
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1).to(self.head.weight)
        y = self.words(x) + self.places(torch.arange(length))
        for layer in self.layers:
            y = layer(y, src_mask=mask)
        return self.head(y)


class Tagger(nn.Module):
    """LSTMs with dropout between their layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(WORDS, 16), nn.LSTM(16, 16, 2, batch_first=True, dropout=0.1)
        self.second, self.head = nn.LSTM(16, 16, batch_first=True), nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.words(x))[0])[0])


class Cached(nn.Module):
    """Keeps what it has made for the last length in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.scale is None or self.scale.shape[0] != x.shape[2]:
            self.scale = torch.linspace(0, 1, x.shape[2], dtype=x.dtype)
        return self.second(self.first(x.mT) * self.scale[:, None]).mT


class Attentive(nn.Module):
    """A recurrent layer, and attention over its outputs with a mask in some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.gru = nn.Embedding(WORDS, 16), nn.GRU(16, 16, batch_first=True)
        self.query, self.value, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), nn.Dropout(0.1)
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.gru(self.drop(self.words(x)))[0]
        scores = self.query(y) @ y.mT / 4
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, :], -1e9)
        return self.head(y + self.drop(scores.softmax(-1)) @ self.value(y))


class Unseen(nn.Module):
    """Its number of layers follows from the length in C code, and two lengths do not show how it pools."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[: 1 + x.shape[2] // 10]:
            x = layer(x).tanh()
        return F.avg_pool1d(x, 3)


class Signals(nn.Module):
    """Convolutions that keep the length."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv1d(4, 8, 3, padding=1), nn.ReLU(), nn.Dropout(0.1), nn.Conv1d(8, 8, 3, padding=1), nn.Tanh()
        )
        self.head = nn.Conv1d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def words(samples: int, length: int) -> torch.Tensor:
    return torch.randint(1, WORDS, (samples, length))


def padded(samples: int, length: int) -> dict[str, torch.Tensor]:
    mask = (torch.arange(length) < torch.randint(length // 2, length + 1, (samples, 1))).long()
    mask[0] = 1  # the first is the longest, without padding: the others take another branch
    return {"input_ids": words(samples, length), "attention_mask": mask}


def next_words(model: nn.Module, samples: int, length: int) -> torch.Tensor:
    x = words(samples, length + 1)
    logits = model(x[:, :-1])
    return F.cross_entropy(logits.reshape(samples * length, WORDS), x[:, 1:].reshape(samples * length))


def filtered(model: nn.Module, samples: int, length: int) -> torch.Tensor:
    return model(torch.randn(samples, 4, length, dtype=torch.float64)).pow(2).mean()


def classified(model: nn.Module, samples: int, length: int) -> torch.Tensor:
    given, labels = padded(samples, length), torch.randint(0, 2, (samples,))
    return model(**given, labels=labels).loss


def generated(model: nn.Module, samples: int, length: int) -> torch.Tensor:
    x = words(samples, length)
    return F.cross_entropy(model(input_ids=x).logits[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def attended(model: nn.Module, samples: int, length: int) -> torch.Tensor:
    """Return the loss of a step, with a mask at every other length."""
    x = words(samples, length)
    mask = torch.arange(length) < torch.randint(length // 2, length + 1, (samples, 1))
    logits = model(x, mask) if LENGTHS.index(length) % 2 else model(x)
    return F.cross_entropy(logits.flatten(0, 1), x.flatten())


def translated(model: nn.Module, samples: int, length: int) -> torch.Tensor:
    return model(input_ids=words(samples, length), labels=words(samples, length - 3)).loss


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32}
    return BertForSequenceClassification(BertConfig(vocab_size=WORDS, num_hidden_layers=2, **sizes))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    ends: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, n_embd=16, n_layer=2, n_head=2, n_positions=64, **ends))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 32, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(vocab_size=WORDS, decoder_start_token_id=0, **sizes))


CASES = {
    "decoder": Case(Decoder, next_words),
    "lstm": Case(Tagger, next_words),
    "convolutions": Case(Signals, filtered),
    "bert": Case(bert, classified),
    "gpt2": Case(gpt2, generated),
    "t5": Case(t5, translated),
}


def train(model: nn.Module, case: Case, samples: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[Any]:
    torch.manual_seed(3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for count, length in zip(samples, lengths, strict=True):
        loss = case.loss(model, count, length)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield loss.item()
    yield from model.state_dict().values()
    yield torch.get_rng_state()


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "varies", [pytest.param(False, marks=pytest.mark.slow, id="length"), pytest.param(True, id="length-and-samples")]
)
@pytest.mark.parametrize("name", CASES)
def test_equal_to_one_device_with_two_captures(
    name: str, varies: bool, pool: WorkerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, samples = CASES[name], SAMPLES if varies else (8,) * len(LENGTHS)
    captures: list[Any] = []
    capture = driver.CaptureDriver.capture
    monkeypatch.setattr(driver.CaptureDriver, "capture", lambda *args: captures.append(args) or capture(*args))
    journal = compare(case, samples, pool)
    assert journal.steps["overlapped"] >= len(LENGTHS) - 3, journal.reasons
    assert len(captures) <= 2 + (name == "bert")  # one more, to find the branch of the whole batch


@pytest.mark.parametrize(
    "sizes",
    [{"sharding_size": 2}, pytest.param({"pipeline_degree": 2, "accum_degree": 4}, marks=pytest.mark.slow)],
    ids=["sharding", "pipeline"],
)
def test_a_forced_mode_plans_every_training_call(sizes: dict[str, Any]) -> None:
    """With and without a mask: the first call of each runs locally, two sizes are planned, and serve all others."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(Attentive().double())
    case, samples, lengths = Case(Attentive, attended), SAMPLES[1:], LENGTHS[1:]
    expected = [*train(models[0], case, samples, lengths)]
    gemini.compile(models[1], GeminiConfig(**sizes, strict=True, quiet=True))
    steps = train(models[1], case, samples, lengths)
    found = [next(steps)]
    managed = dispatch.find_managed(models[1])
    managed.pipelined.plans.plans_at_once = False  # as under gemini_python
    found += steps
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-6, atol=1e-7)
    assert managed.journal.steps["overlapped"] >= len(lengths) - 4, managed.journal.reasons
    assert sum(kind.origin is None for kinds in managed.pipelined.plans.kinds.values() for kind in kinds) == 4


def test_tensors_kept_for_the_last_length(pool: WorkerPool) -> None:
    compare(Case(Cached, filtered), SAMPLES, pool, lengths=(16, 16, 12, 20, 20, 8, 30, 4, 2, 1, 3, 3, 16))


def test_sizes_that_two_lengths_do_not_show(pool: WorkerPool) -> None:
    compare(Case(Unseen, filtered), SAMPLES, pool, lengths=(12, 12, 14, 30, 13, 40, 28, 12, 31, 22, 36, 14, 25))


def compare(case: Case, samples: tuple[int, ...], pool: WorkerPool, lengths: tuple[int, ...] = LENGTHS) -> ModelJournal:
    """Train a model locally and in workers; compare losses, weights and the generator."""
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(case.make().double())
    expected = [*train(models[0], case, samples, lengths)]
    journal = manage(models[1], pool)
    found = [*train(models[1], case, samples, lengths)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), rtol=1e-6, atol=1e-7)
    return journal
