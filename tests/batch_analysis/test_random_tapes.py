"""Random tapes: wherever a proof succeeds, the numbers agree."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.batch_analysis.recorder import Step

D = 4


def other(x, y):
    return y if y.shape == x.shape else x


# Each takes the value at hand, an earlier one of any shape, and the module.
STEPS = {
    "tanh": lambda x, y, m: x.tanh(),
    "half": lambda x, y, m: x * 0.5 + 0.1,
    "with": lambda x, y, m: x * other(x, y).tanh(),
    "minus": lambda x, y, m: x - other(x, y),
    "linear": lambda x, y, m: m.fc(x) if x.dim() and x.shape[-1] == D else x,
    "transpose": lambda x, y, m: x.transpose(0, -1),
    "swap": lambda x, y, m: x.transpose(-1, -2) if x.dim() > 1 else x,
    "flat": lambda x, y, m: x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x,
    "flat front": lambda x, y, m: x.reshape(x.shape[0], -1) if x.dim() > 1 else x,
    "all flat": lambda x, y, m: x.reshape(-1),
    "back": lambda x, y, m: x.reshape(y.shape) if x.numel() == y.numel() else x,
    "softmax": lambda x, y, m: x.softmax(-1) if x.dim() else x,
    "softmax first": lambda x, y, m: x.softmax(0) if x.dim() else x,
    "cumsum": lambda x, y, m: x.cumsum(1) if x.dim() > 1 else x,
    "sort": lambda x, y, m: x.sort(-1).values if x.dim() else x,
    "sum last": lambda x, y, m: x.sum(-1) if x.dim() > 1 else x,
    "mean first": lambda x, y, m: x.mean(0) if x.dim() > 1 else x,
    "mean second": lambda x, y, m: x.mean(1, keepdim=True) if x.dim() > 1 else x,
    "max last": lambda x, y, m: x.amax(-1) if x.dim() > 1 else x,
    "unsqueeze": lambda x, y, m: x.unsqueeze(0) if x.dim() < 4 else x,
    "squeeze": lambda x, y, m: x.squeeze(0) if x.dim() > 1 else x,
    "first": lambda x, y, m: x[0] if x.dim() > 1 else x,
    "last of second": lambda x, y, m: x[:, -1] if x.dim() > 1 else x,
    "some": lambda x, y, m: x[:, 1:] if x.dim() > 1 and x.shape[1] > 1 else x,
    "twice": lambda x, y, m: torch.cat([x, x * 2], -1) if x.dim() else x,
    "twice in front": lambda x, y, m: torch.cat([x, x * 2], 0) if x.dim() else x,
    "stack": lambda x, y, m: torch.stack([x, other(x, y)], 1) if 0 < x.dim() < 4 else x,
    "repeat": lambda x, y, m: x.repeat_interleave(2, 0) if x.dim() else x,
    "tile": lambda x, y, m: x.repeat(2, *[1] * (x.dim() - 1)) if x.dim() else x,
    "gram": lambda x, y, m: x @ x.transpose(-1, -2) if x.dim() > 1 else x,
    "flip": lambda x, y, m: x.flip(0) if x.dim() else x,
    "flip last": lambda x, y, m: x.flip(-1) if x.dim() > 1 else x,
    "norm": lambda x, y, m: F.layer_norm(x, x.shape[-1:]) if x.dim() > 1 and x.shape[-1] > 1 else x,
    "written": lambda x, y, m: _written(x),
    "halves": lambda x, y, m: x.chunk(2, 1)[0] if x.dim() > 1 and x.shape[1] > 1 else x,
    "outer": lambda x, y, m: x[..., None] * x[..., None, :] if 0 < x.dim() < 3 else x,
    "number": lambda x, y, m: x / x.shape[0] if x.dim() else x,
    "sum": lambda x, y, m: x + x.sum(),
    "centre": lambda x, y, m: x - x.mean(),
}
ENDS = {
    "mean": lambda x, y, m: x.square().mean(),
    "sum": lambda x, y, m: x.sin().sum(),
    "two": lambda x, y, m: x.square().mean() + y.sum() * 0.1,
    "over the number": lambda x, y, m: x.square().sum() / (x.shape[0] if x.dim() else 1),
    "with weights": lambda x, y, m: x.square().sum() + m.fc.weight.square().sum() + 1.0,
    "means of means": lambda x, y, m: (x.mean(0).sum() + y.mean()) / 2 - 1.0,
    "classes": lambda x, y, m: (
        F.cross_entropy(x, torch.zeros(x.shape[0], dtype=torch.long, device=x.device)) if x.dim() == 2 else x.mean()
    ),
    "product": lambda x, y, m: x.mean() * y.mean(),
    "norm": lambda x, y, m: x.norm(),
}


def _written(x):
    if x.dim() < 2 or x.shape[1] < 2:
        return x
    made = x.clone()
    made[:, 0] = 1.0
    return made


class Program(nn.Module):
    """Steps one after the other; each also sees an earlier value."""

    def __init__(self, steps, end, inside) -> None:
        super().__init__()
        self.fc = nn.Linear(D, D)
        self.steps, self.end, self.inside = steps, end, inside

    def forward(self, x):
        return run(self, x) if self.inside else self.fc(x)


def run(program, x):
    values = [x, program.fc(x)]
    for name, back in program.steps:
        found = STEPS[name](values[-1], values[max(len(values) - 1 - back, 0)], program)
        values.append(found if found.numel() < 5000 else values[-1])
    return ENDS[program.end](values[-1], values[-2], program)


programs = st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), max_size=6)
proven = {"yes": 0, "no": 0}


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    programs, st.sampled_from(sorted(ENDS)), st.sampled_from([(5, 3, D), (4, 4, D), (5, D), (6, 1, D)]), st.booleans()
)
def test_a_proof_is_never_wrong(steps, end, shape, inside):
    torch.manual_seed(0)
    program = Program(steps, end, inside).double()
    x = torch.randn(*shape, dtype=torch.float64)
    loss = (lambda o: o * 1.0) if inside else (lambda o: run(program, o))
    try:
        run(program, x)
    except (RuntimeError, IndexError):
        return
    step = Step(program, (x,), loss)
    proven["no" if step.reason else "yes"] += 1
    if not step.reason:
        for sizes in ([2, shape[0] - 2], [1] * shape[0]):
            assert step.difference(sizes) == "", (steps, end, shape, inside)


def test_many_of_them_are_proven():
    if not sum(proven.values()):
        test_a_proof_is_never_wrong()
    assert min(proven.values()) > 5, proven
