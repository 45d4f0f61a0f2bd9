"""Random chains of ops on deferred model outputs agree with plain torch."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings

from tests import models
from tests.runtime.deferred.rig import Session, compare

# Each takes two tensors of the pool and a number, and returns something for the pool, or nothing.
OPS: dict[str, Any] = {
    "add": lambda a, b, k: a + b,
    "sub": lambda a, b, k: a - k,
    "rsub": lambda a, b, k: k - a,
    "mul": lambda a, b, k: a * b,
    "int_mul": lambda a, b, k: a * int(k),
    "div": lambda a, b, k: a / (b.abs() + 1),
    "pow": lambda a, b, k: a.pow(2),
    "tanh": lambda a, b, k: torch.tanh(a),
    "softmax": lambda a, b, k: F.softmax(a, -1),
    "relu": lambda a, b, k: a.relu(),
    "matmul": lambda a, b, k: a.t() @ b,
    "sum": lambda a, b, k: a.sum(),
    "mean0": lambda a, b, k: a.mean(0),
    "max": lambda a, b, k: a.max(-1).values,
    "argmax": lambda a, b, k: a.argmax(-1).to(a.dtype),
    "sort": lambda a, b, k: a.sort(-1)[0],
    "view": lambda a, b, k: a.reshape(-1),
    "row": lambda a, b, k: a[1],
    "column": lambda a, b, k: a[..., 0],
    "mask": lambda a, b, k: a.masked_fill(a > k, 0.5),
    "where": lambda a, b, k: torch.where(a > 0, a, b),
    "cat": lambda a, b, k: torch.cat([a, b]),
    "stack": lambda a, b, k: torch.stack([a, a, b]).sum(0),
    "chunk": lambda a, b, k: a.chunk(2)[0],
    "detach": lambda a, b, k: a.detach(),
    "clone": lambda a, b, k: a.clone(),
    "zeros_like": lambda a, b, k: torch.zeros_like(a) + k,
    "expand": lambda a, b, k: a.unsqueeze(0).expand(2, *a.shape).mean(0),
    "float": lambda a, b, k: a + (a.float() * 0).double(),  # rounded to float32, a last bit would count
    "same": lambda a, b, k: a.contiguous(),
    "var": lambda a, b, k: a.var(),
    "norm": lambda a, b, k: F.layer_norm(a, a.shape[-1:]) if a.dim() else a,
    "add_": lambda a, b, k: a.add_(k),
    "mul_": lambda a, b, k: a.mul_(b),
    "iadd": lambda a, b, k: a.__iadd__(b),
    "zero_row": lambda a, b, k: a.__setitem__(0, k),
    "set_mask": lambda a, b, k: a.__setitem__(a > k, 0.0),
    "fill_": lambda a, b, k: a.masked_fill_(a < k, k),
    "no_grad": lambda a, b, k: torch.no_grad()(lambda: a * b)(),
    "shape": lambda a, b, k: a * a.shape[0] / max(a.numel(), 1),
    "bool": lambda a, b, k: a * 2 if a.sum() > k else a * 3,
    "item": lambda a, b, k: a + a.sum().item(),
    "split": lambda a, b, k: sum(part.sum() for part in a.unbind(0)),
    "loss": lambda a, b, k: F.mse_loss(a, b),
}
OP = st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 9), st.integers(0, 9), st.sampled_from([0.5, -1.0, 2.0]))
CHAIN = st.lists(OP, min_size=1, max_size=9)


def run(s: Session, chain: list[Any], ending: str) -> None:
    pool: list[torch.Tensor] = [s.model(s.x), s.t.clone(), s.head.bias.sum() * 1]
    if ending == "two calls":
        pool.append(s.model(s.x2))
    for name, i, j, k in chain:
        try:
            made = OPS[name](pool[-1 - i % len(pool)], pool[-1 - j % len(pool)], k)
        except (RuntimeError, IndexError, TypeError) as error:
            s.saw(f"{name}: {type(error).__name__}")
            continue
        if isinstance(made, torch.Tensor):
            s.saw(tuple(made.shape), str(made.dtype), made.requires_grad, made.is_leaf)
            pool.append(made)
    if ending == "read first":
        s.saw(*(one.detach().clone() for one in pool))
    scalars = [one.mean() for one in pool if one.requires_grad]
    if scalars:
        loss = scalars[-1] if ending == "last" else sum(scalars)
        loss.backward()
        s.saw(loss.detach())
    s.saw(*(one.detach() for one in pool), *(p.grad for p in s.parameters if p.grad is not None))
    s.update()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eager", "overlapped", "outputs", "nothing"])
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(chain=CHAIN, ending=st.sampled_from(["last", "all", "read first", "two calls"]))
def test_a_few_agree(mode: str, chain: list[Any], ending: str) -> None:
    compare(lambda s: run(s, chain, ending), models.plain, mode, steps=1, exact=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eager", "overlapped", "outputs", "nothing"])
@pytest.mark.parametrize(
    "chain",
    [
        [("max", 0, 0, 0.5), ("column", 0, 0, 0.5), ("add_", 0, 0, 0.5)],
        [("max", 0, 0, 0.5), ("column", 0, 0, 0.5), ("add", 0, 2, 0.5), ("add_", 1, 0, 0.5)],
        [("max", 0, 0, 0.5), ("add", 0, 0, 0.5), ("column", 1, 0, 0.5), ("chunk", 2, 0, 0.5), ("add_", 1, 0, 0.5)],
        [("chunk", 0, 0, 0.5), ("item", 0, 0, 0.5), ("iadd", 1, 1, 0.5)],
    ],
)
def test_what_is_written_to_one_entry_shows_in_all_the_values(mode: str, chain: list[Any]) -> None:
    compare(lambda s: run(s, chain, "two calls"), models.plain, mode, steps=1, exact=False)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eager", "overlapped", "outputs", "nothing"])
@pytest.mark.parametrize(
    "chain",
    [
        # No number comes back to a sum that was replaced, which gives nothing on.
        [("add", 0, 0, 0.5), ("sum", 3, 0, 0.5), ("fill_", 0, 0, 0.5), ("bool", 0, 0, 0.5), ("var", 0, 0, 0.5)],
        # A quotient that the loss does not need, of something that is written to later.
        [("add", 0, 0, 0.5), ("div", 0, 0, 0.5), ("add", 0, 4, 0.5), ("add_", 2, 0, 0.5), ("add", 0, 6, 0.5)],
    ],
)
def test_gradients_that_are_no_numbers_and_operands_that_a_loss_does_not_need(mode: str, chain: list[Any]) -> None:
    compare(lambda s: run(s, chain, "last"), models.plain, mode, steps=1, exact=False)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("mode", ["eager", "overlapped", "outputs", "nothing"])
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(chain=CHAIN, ending=st.sampled_from(["last", "all", "read first", "two calls"]))
def test_many_agree(mode: str, chain: list[Any], ending: str) -> None:
    compare(lambda s: run(s, chain, ending), models.plain, mode, steps=1, exact=False)
