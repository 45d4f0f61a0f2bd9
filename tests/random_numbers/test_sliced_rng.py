"""A stage in micro-batches draws the random numbers of the whole batch and advances the generator equally."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gemini.random_numbers.random_ops import UnsliceableRandomOp
from gemini.random_numbers.rng_recorder import RandomOpRecorder, match_patterns
from gemini.random_numbers.sliced_rng import RandomOpsDiffer, SlicedRandomOps

Code = Callable[[torch.Tensor], torch.Tensor]
_lstm = nn.LSTM(6, 6, 2, dropout=0.3, batch_first=True)
_layer = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.2, batch_first=True)


def attention(x: torch.Tensor) -> torch.Tensor:
    heads = x.unflatten(-1, (2, 3)).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.25).transpose(1, 2).flatten(2)


def twice(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(torch.relu(F.dropout(x, 0.4)), 0.1)


def nested(x: torch.Tensor) -> torch.Tensor:
    inner = checkpoint(lambda y: F.dropout(torch.tanh(F.dropout(y, 0.2)), 0.3), x, use_reentrant=False)
    return F.dropout(torch.sin(inner), 0.1)


def checkpointed(x: torch.Tensor, reentrant: bool) -> torch.Tensor:
    """Two parts that run again in backward, with a draw before, between and after."""
    x = checkpoint(twice, F.dropout(x, 0.5), use_reentrant=reentrant)
    x = F.dropout(torch.tanh(x), 0.2)
    return F.dropout(checkpoint(twice if reentrant else nested, x, use_reentrant=reentrant), 0.3)


CODES: dict[str, Code] = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "twice": twice,
    "time first": lambda x: F.dropout(x.transpose(0, 1), 0.3).transpose(0, 1),
    "flattened": lambda x: F.dropout(x.flatten(0, 1), 0.3).unflatten(0, (x.shape[0], -1)),
    "attention": attention,
    "channels": lambda x: F.dropout1d(x, 0.5),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "noise": lambda x: x + torch.randn_like(x) * 0.1,
    "new": lambda x: x * torch.rand(x.shape[0], 1, 1, dtype=x.dtype),
    "gumbel": lambda x: F.gumbel_softmax(x, dim=-1),
    "one number for all": lambda x: x * torch.rand(()) + torch.randint(0, 5, (1,)),
    "not through a door": lambda x: x * torch.empty_like(x).bernoulli_(0.5),
    "lstm": lambda x: _lstm.to(x.dtype)(x)[0],
    "layer": lambda x: _layer.to(x.dtype)(x),
    "checkpointed": lambda x: checkpointed(x, reentrant=False),
    "checkpointed, re-entrant": lambda x: checkpointed(x, reentrant=True),
}


def recorded(code: Code, x: torch.Tensor, samples: int) -> list:
    recorder = RandomOpRecorder()
    with torch.random.fork_rng(), recorder.recording():
        code(x[:samples].clone())
    return recorder.ops


@pytest.mark.parametrize("code", CODES.values(), ids=CODES.keys())
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 3, 1), (1,) * 7], ids=str)
def test_draws_as_the_whole_batch(code: Code, sizes: tuple[int, ...]) -> None:
    samples = sum(sizes)
    x = torch.randn(samples, 5, 6, dtype=torch.float64, requires_grad=True)
    found = match_patterns(recorded(code, x, 3), 3, recorded(code, x, 2), 2)
    torch.manual_seed(7)
    expected = code(x)
    after = torch.get_rng_state()
    expected.pow(2).sum().backward()
    wanted, x.grad = x.grad, None

    torch.manual_seed(7)
    draws, start, parts = SlicedRandomOps(found, samples), 0, []
    for length in sizes:
        with draws.micro_batch(start, length):
            parts.append(code(x[start : start + length]))
        if start == 0:
            assert torch.equal(torch.get_rng_state(), after)
        start += length
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(torch.cat(parts), expected, rtol=1e-12, atol=1e-12)
    for part in parts[::-1]:
        with draws.recompute():
            part.pow(2).sum().backward()
    assert torch.equal(torch.get_rng_state(), after)
    torch.testing.assert_close(x.grad, wanted, rtol=1e-12, atol=1e-12)


def test_a_shard_draws_in_the_memory_order_of_one_device() -> None:
    x = torch.ones(5, 4, 6).transpose(0, 1)  # a recurrent layer returns such values; an exchange makes them contiguous
    found = match_patterns(recorded(CODES["dropout"], x, 3), 3, recorded(CODES["dropout"], x, 2), 2)
    torch.manual_seed(7)
    wanted = CODES["dropout"](x)
    torch.manual_seed(7)
    with SlicedRandomOps(found, 4, shard=(1, 2)).micro_batch(0, 4):
        drawn = CODES["dropout"](x.contiguous())
    assert torch.equal(drawn, wanted)


@pytest.mark.parametrize("length", [4, 2])
def test_draws_in_backward_that_forward_did_not_make_are_noticed(length: int) -> None:
    x = torch.rand(4, 5, 6, requires_grad=True)
    found = match_patterns(recorded(twice, x, 3), 3, recorded(twice, x, 2), 2)
    draws = SlicedRandomOps(found, 4)
    with draws.micro_batch(0, length):
        y = twice(x[:length])
    y.register_hook(lambda gradient: F.dropout(gradient, 0.5))
    with pytest.raises(RandomOpsDiffer, match=r"no(ne| random op) in forward"), draws.recompute():
        y.sum().backward()


def test_draws_by_contents_are_refused() -> None:
    x = torch.rand(4, 5, 6)
    for code in (lambda x: x * torch.bernoulli(x), lambda x: torch.multinomial(x[:, 0], 2)):
        with pytest.raises(UnsliceableRandomOp, match="depend on contents"):
            recorded(code, x, 3)


def test_draws_that_grow_otherwise_are_refused() -> None:
    x = torch.rand(4, 5, 6)
    for code in (
        lambda x: torch.rand(len(x) + 1),
        lambda x: torch.rand(len(x), len(x)),
        lambda x: torch.rand(9 // len(x)),
    ):
        with pytest.raises(UnsliceableRandomOp):
            match_patterns(recorded(code, x, 3), 3, recorded(code, x, 2), 2)


def test_another_draw_than_recorded_is_noticed() -> None:
    x = torch.rand(4, 5, 6)
    found = match_patterns(recorded(twice, x, 3), 3, recorded(twice, x, 2), 2)
    for code in (lambda x: F.dropout(x, 0.4), lambda x: twice(F.dropout(x)), lambda x: twice(x[:, :4])):
        with pytest.raises(RandomOpsDiffer), SlicedRandomOps(found, 4).micro_batch(0, 2):
            code(x[:2])


def test_attention_without_dropout_draws_nothing() -> None:
    heads = torch.rand(4, 2, 5, 3)
    assert recorded(lambda x: F.scaled_dot_product_attention(x, x, x), heads, 3) == []


def test_only_patched_functions_are_watched_where_all_random_ops_are_in_them() -> None:
    x = torch.randn(4, 5, 6)
    for name, code in CODES.items():
        is_patched = all(draw.is_patched for draw in recorded(code, x.double(), 3))
        assert is_patched == (name not in {"not through a door", "lstm"}), name
