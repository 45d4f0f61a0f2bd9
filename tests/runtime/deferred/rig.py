"""Run a program with a plain model and with a model of deferred calls, and compare the observed values.

The overlapped run is a reference in this process: the model in micro-batches, the tape on the whole batch, gradients
back through the micro-batches.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemini.batch_analysis.loss_tape import Tape
from gemini.batch_analysis.tape_interpreter import FailedValue, replay_tape
from gemini.capture.module_hooks import without_tensor_hooks
from gemini.ir.call_binding import ModelCall
from gemini.ir.encode import decode
from gemini.runtime.call_outcome import Eager
from gemini.runtime.deferred import (
    CallRunner,
    DeferredTensor,
    OutputSpec,
    PendingCall,
    StepResult,
    defer,
    materialize_arguments,
)
from gemini.runtime.deferred.contract import flatten_output

MODES = ("eager", "overlapped", "outputs", "nothing", "failing")


@dataclass(kw_only=True)
class Runner(CallRunner):
    """Calls of a session's model."""

    session: Session

    def run_eager(self, args: Any, kwargs: Any) -> Any:
        self.session.runs.append("eager")
        return self.session.net(*args, **kwargs)

    def run_pipelined(self, pending: PendingCall, tape: Tape, root: int) -> StepResult | Eager:
        return self.session.run_pipelined(pending, tape, root)

    def on_failure(self, error: Exception) -> None:
        self.session.runs.append("failed")


class Session:
    """What a program is given: a model to call, data, and a place to say what it sees."""

    def __init__(self, net: nn.Module, mode: str | None, pieces: int = 3, **facts: bool) -> None:
        self.net, self.mode, self.pieces, self.facts = net, mode, pieces, facts
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        self.x2 = torch.randn(7, 4, generator=generator, dtype=torch.float64)
        self.y = torch.randint(0, 3, (7,), generator=generator)
        self.t = torch.randn(7, 3, generator=generator, dtype=torch.float64)
        self.head = nn.Linear(3, 2, dtype=torch.float64)
        with torch.no_grad():
            for one in self.head.parameters():
                one.copy_(torch.randn(one.shape, generator=generator))
        self.parameters = [*net.parameters(), *self.head.parameters()]
        self.optimizer = torch.optim.SGD(self.parameters, 0.1, momentum=0.9)
        self.seen: list[Any] = []
        self.runs: list[str] = []
        self._runners: dict[Any, Runner] = {}

    def model(self, *args: Any, **kwargs: Any) -> Any:
        """A call of the model."""
        if self.mode is None:
            return self.net(*args, **kwargs)
        return defer(self.runner(args, kwargs), ModelCall(*materialize_arguments(args, kwargs)))

    def runner(self, args: Any, kwargs: Any) -> Runner:
        def facts(one: torch.Tensor) -> Any:
            return tuple(one.shape), one.dtype, one.requires_grad

        found = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
        key = (*map(facts, found), self.net.training, torch.is_autocast_enabled("cpu"), torch.is_grad_enabled())
        if key not in self._runners:
            twin = copy.deepcopy(self.net)
            real = [one.detach().clone().requires_grad_(one.requires_grad) for one in found]
            places = {id(one): made for one, made in zip(found, real, strict=True)}
            with torch.random.fork_rng():
                output = twin(
                    *(places.get(id(one), one) for one in args), **{k: places.get(id(v), v) for k, v in kwargs.items()}
                )
            trained = [one for one in self.net.parameters() if one.requires_grad]
            self._runners[key] = Runner(
                session=self, model=self.net, output_spec=OutputSpec.of(output), parameters=trained, **self.facts
            )
        return self._runners[key]

    def run_pipelined(self, pending: PendingCall, tape: Tape, root: int) -> StepResult | Eager:
        """Run a step as the mode says."""
        if self.mode == "eager":
            return Eager("")
        if self.mode == "failing":
            raise OSError("a worker is gone")
        self.runs.append("overlapped")
        if self.mode == "whole":  # one micro-batch, with all effects
            return overlapped(self.net, pending, tape, root, 1, None)
        kept = {"overlapped": None, "outputs": range(tape.outputs), "nothing": ()}[str(self.mode)]
        return overlapped(self.net, pending, tape, root, self.pieces, kept)

    def saw(self, *values: Any) -> None:
        """Something that the program has seen."""
        for value in values:
            if isinstance(value, torch.Tensor):
                self.seen.append(
                    value.detach().clone() if not isinstance(value, DeferredTensor) else value.detach().numpy()
                )
            else:
                self.seen.append(value)

    def update(self) -> None:
        """An optimizer step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


def overlapped(  # noqa: PLR0917
    net: nn.Module, pending: PendingCall, tape: Tape, root: int, pieces: int, kept: Any, dim: int = 0
) -> StepResult:
    """Call, tape and backward in micro-batches."""
    metas = tape.metas[: tape.outputs]
    size = pending.inputs[0].shape[dim] if pending.inputs else 0
    if not size or any(not meta.shape or meta.shape[dim] != size for meta in metas):
        pieces = 1
    given = [one.detach().requires_grad_(one.requires_grad) for one in pending.inputs]
    cut = [one.tensor_split(pieces, dim) if pieces > 1 else [one] for one in given]
    made = []
    for at in range(pieces):
        args, kwargs = decode(pending.call.form, lambda ref, at=at: cut[ref.node][at])
        with torch.enable_grad():
            made.append(flatten_output(net(*args, **kwargs))[1])
    whole = [torch.cat([one[at].detach() for one in made], dim) if pieces > 1 else made[0][at].detach()
             for at in range(tape.outputs)]  # fmt: skip
    leaves = [one.clone().requires_grad_(meta.requires_grad) for one, meta in zip(whole, metas, strict=True)]
    values: dict[int, Any] = {at: one.view_as(one) if one.requires_grad else one for at, one in enumerate(leaves)}
    inner = Tape(tape.outputs, tape.metas, {
        number: one if isinstance(one, nn.Parameter) else one.detach().requires_grad_(one.requires_grad)
        for number, one in tape.operands.items()
    }, tape.ops)  # fmt: skip
    with torch.enable_grad():
        replay_tape(inner, tape.ops_needed_for(root, *pending.alive()), values)
    if isinstance(values[root], FailedValue):
        raise values[root].error
    operands = {number: one for number, one in inner.operands.items() if one.requires_grad}
    wanted = [one for one in leaves if one.requires_grad] + list(operands.values())
    found = torch.autograd.grad(
        values[root], wanted, torch.ones_like(values[root]), allow_unused=True, retain_graph=True
    )
    by_output = iter(found)
    arriving = [next(by_output) if one.requires_grad else None for one in leaves]
    parameters = pending.runner.parameters
    targets = [*parameters, *(one for one in given if one.requires_grad)]
    pairs = [(one[at], g.split([m[at].shape[dim] for m in made], dim)[k] if pieces > 1 else g)
             for k, one in enumerate(made) for at, g in enumerate(arriving) if g is not None]  # fmt: skip
    gradients = [None] * len(targets)
    if pairs and targets:
        outputs, given_to = zip(*pairs, strict=True)
        with without_tensor_hooks(parameters):  # workers have none
            gradients = list(torch.autograd.grad(outputs, targets, given_to, allow_unused=True))
    inputs = iter(gradients[len(parameters) :])
    keep = range(len(tape.metas)) if kept is None else kept
    rest = dict(zip(operands, found[len(found) - len(operands) :], strict=True))
    fetched = {at: one.detach().clone() for at in keep if isinstance(one := values.get(at), torch.Tensor)}
    return StepResult(
        values[root].detach().clone(),
        [None if one is None else one.clone() for one in gradients[: len(parameters)]],
        {at: next(inputs) for at, one in enumerate(pending.inputs) if one.requires_grad},
        rest,
        frozenset(fetched),
        fetched.__getitem__,
    )


Program = Callable[[Session], None]


def compare(
    program: Program, make: Callable[[], nn.Module], mode: str, steps: int = 2, exact: bool = True, **facts: bool
) -> Session:
    """Run a program both ways; all that it sees, all gradients, parameters, buffers and the generator must agree."""
    both = []
    for one in (None, mode):
        torch.manual_seed(3)
        session = Session(make(), one, **facts)
        torch.manual_seed(5)
        error = ""
        try:
            for _ in range(steps):
                program(session)
        except Exception as caught:  # both must raise the same
            error = f"{type(caught).__name__}: {caught}"
        session.seen.append(error)
        both.append((session, torch.get_rng_state()))
    (plain, generator), (ours, generator2) = both
    if "modified by an inplace operation" in plain.seen[-1]:
        return ours  # autograd keeps no copies of what it saves and has to give up; what is put off has them
    tolerance = (0.0 if exact else 1e-13) if mode in ("eager", "failing") else 1e-9
    assert ours.seen[-1] == plain.seen[-1], (ours.seen[-1], plain.seen[-1])
    assert len(ours.seen) == len(plain.seen), (len(ours.seen), len(plain.seen))
    for a, b in zip(ours.seen, plain.seen, strict=True):
        agree(a, b, tolerance)
    for a, b in zip(state(ours), state(plain), strict=True):
        agree(a, b, tolerance)
    assert torch.equal(generator, generator2), "generator"
    return ours


def state(session: Session) -> list[Any]:
    found: list[Any] = []
    for one in session.parameters:
        found += [one.detach(), one.grad]
    return [*found, *session.net.buffers(), session.x, session.y, session.t, session.x.grad]


def agree(a: Any, b: Any, tolerance: float) -> None:
    assert (a is None) == (b is None), (a, b)
    if isinstance(a, torch.Tensor) or hasattr(a, "__array__"):
        a, b = torch.as_tensor(a), torch.as_tensor(b)
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        if tolerance and a.is_floating_point():
            loose = max(tolerance, 1e-2 if a.dtype is torch.bfloat16 else 1e-2 if a.dtype is torch.float32 else 0.0)
            torch.testing.assert_close(a, b, rtol=loose, atol=loose, equal_nan=True)
        else:
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    elif isinstance(a, float) and tolerance:
        assert math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance) or (math.isnan(a) and math.isnan(b))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for one, other in zip(a, b, strict=True):
            agree(one, other, tolerance)
    elif isinstance(a, str) and tolerance:
        assert type(b) is str  # numbers in it may differ in the last digit
    else:
        assert a == b, (a, b)
