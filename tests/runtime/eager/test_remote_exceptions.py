"""An exception in a worker reaches the program as itself, and the program can continue."""

from __future__ import annotations

import contextlib
import gc
import logging
import sys
import threading
import traceback
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pool.fault_policy import add_fault_note, rebuild_with_traceback
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.protocol import Raised

pytestmark = pytest.mark.usefixtures("trusted_tests")


class NeedsArguments(Exception):
    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(f"code {code}: {hint}")
        self.code, self.hint = code, hint


class TellsOtherwise(ValueError):
    def __init__(self, name: str) -> None:
        super().__init__(f"no {name} here")


class HoldsALock(RuntimeError):
    def __init__(self, text: str) -> None:
        super().__init__(text, threading.Lock())
        self.lock = threading.Lock()
        self.kept = 3


class Silent(Exception):
    def __str__(self) -> str:
        raise TypeError("no text")


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


def local_class() -> None:
    class Hidden(LookupError):
        pass

    raise Hidden("from inside a function")


def chained() -> None:
    try:
        raise KeyError("the first")
    except KeyError as error:
        raise OSError(2, "not there", "file.txt") from error


def raising(error: Callable[[], BaseException]) -> Callable[[], None]:
    def run() -> None:
        raise error()

    return run


FAULTS: dict[str, tuple[Callable[[], Any], type[BaseException], str]] = {
    "plain": (raising(lambda: ValueError("wrong", 3)), ValueError, "('wrong', 3)"),
    "arguments": (raising(lambda: NeedsArguments(7, hint="none")), NeedsArguments, "code 7: none"),
    "rewritten text": (raising(lambda: TellsOtherwise("bread")), TellsOtherwise, "no bread here"),
    "not picklable": (raising(lambda: HoldsALock("held")), HoldsALock, "held"),
    "no text": (raising(Silent), Silent, ""),
    "interrupt": (raising(lambda: KeyboardInterrupt("mine")), KeyboardInterrupt, "mine"),
    "exit": (raising(lambda: SystemExit(3)), SystemExit, "3"),
    "iteration": (raising(lambda: StopIteration(4)), StopIteration, "4"),
    "generator": (raising(lambda: GeneratorExit("out")), GeneratorExit, "out"),
    "recursion": (recurse, RecursionError, "recursion depth"),
    "memory": (lambda: torch.empty(1 << 46), RuntimeError, "alloc"),
    "memory of Python": (raising(MemoryError), MemoryError, ""),
    "shapes": (lambda: torch.ones(2, 3) @ torch.ones(2, 3), RuntimeError, "cannot be multiplied"),
    "local class": (local_class, LookupError, "from inside a function"),
    "chained": (chained, FileNotFoundError, "not there"),
    "unicode": (b"\xff".decode, UnicodeDecodeError, "invalid start byte"),
    "tensor": (raising(lambda: ValueError("bad", torch.ones(3))), ValueError, "bad"),
    "assertion": (raising(lambda: AssertionError), AssertionError, ""),
}


class BackwardFault(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, name: str) -> torch.Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.name:
            FAULTS[ctx.name][0]()
        return gradient, None


class Inner(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)  # no module inside: always one unit

    def forward(self, x: torch.Tensor, fault: str = "", later: str = "") -> torch.Tensor:
        x = F.dropout(x @ self.weight, 0.1, self.training)
        if fault:
            FAULTS[fault][0]()
        return BackwardFault.apply(x, later)


class Net(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first = nn.ModuleList(Inner(width) for _ in range(3))
        self.batch = nn.BatchNorm1d(width)
        self.inner = Inner(width)
        self.last = nn.ModuleList(Inner(width) for _ in range(3))

    def forward(self, x: torch.Tensor, fault: str = "", later: str = "") -> torch.Tensor:
        for one in self.first:
            x = one(x)
        x = self.inner(self.batch(x), fault, later)
        for one in self.last:
            x = one(x)
        return x


def started(pool: WorkerPool, model: nn.Module | None = None, **options: Any) -> tuple[nn.Module, ManagedModel]:
    """A managed model whose units are in their workers."""
    made = Net() if model is None else model
    managed = ManagedModel(made, pool, **{"quiet": True, **options})
    dispatch.manage(made, managed)
    for _ in range(3):
        made(torch.randn(8, 32)).sum().backward()
    made.zero_grad()
    assert managed.calls
    return made, managed


def frames(error: BaseException) -> list[str]:
    """Its traceback without what lies between a program and its modules: frames of torch's modules, and of ours."""
    shown = traceback.format_tb(error.__traceback__)
    between = ("/torch/nn/modules/module.py", "/gemini/runtime/", "[Previous line repeated")
    return [one for one in shown if not any(part in one for part in between)]


def fails(model: nn.Module, fault: str = "", later: str = "") -> BaseException:
    kind, text = FAULTS[fault or later][1:]
    with pytest.raises(kind) as caught:
        model(torch.randn(8, 32), fault, later).sum().backward()
    if (fault or later) not in ("no text", "tensor"):
        assert text in str(caught.value)
    return caught.value


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", FAULTS)
def test_an_exception_in_forward_is_the_programs_own(fault: str, pool: WorkerPool) -> None:
    model, managed = started(pool)
    local = Net()
    local.load_state_dict(model.state_dict())
    torch.manual_seed(1)
    expected = fails(local, fault)
    drawn = torch.get_rng_state()
    torch.manual_seed(1)
    error = fails(model, fault)
    assert type(error).__name__ == type(expected).__name__
    if type(error).__qualname__ in globals():
        assert type(error) is type(expected)
    assert torch.equal(drawn, torch.get_rng_state())
    assert any(
        "worker" in add_fault_note and "forward of inner" in add_fault_note for add_fault_note in error.__notes__
    )
    shown = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    assert "in forward" in shown
    assert frames(error)[-1] == frames(expected)[-1]
    assert shown.count("/gemini/runtime/") <= 1  # the call itself
    for at in range(3):
        torch.manual_seed(at)
        here = local(torch.ones(8, 32))
        torch.manual_seed(at)
        assert torch.equal(here, model(torch.ones(8, 32)))
    assert not managed.demotions
    assert all(torch.equal(a, b) for a, b in zip(local.buffers(), model.buffers(), strict=True))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fault", ["plain", "arguments", "interrupt", "exit", "shapes", "not picklable"])
def test_an_exception_in_backward_is_the_programs_own(fault: str, pool: WorkerPool) -> None:
    model, managed = started(pool)
    error = fails(model, later=fault)
    assert any("backward of inner" in add_fault_note for add_fault_note in error.__notes__)
    model(torch.randn(8, 32)).sum().backward()
    assert not managed.demotions


def test_fields_of_an_exception_survive(pool: WorkerPool) -> None:
    model, _ = started(pool)
    error = fails(model, "arguments")
    assert (error.code, error.hint) == (7, "none")  # type: ignore[attr-defined]
    assert fails(model, "not picklable").kept == 3  # type: ignore[attr-defined]
    assert fails(model, "chained").errno == 2  # type: ignore[attr-defined]
    assert "the first" in str(fails(model, "chained").__cause__)


def test_an_exception_that_is_dropped_frees_all_it_knew(pool: WorkerPool) -> None:
    model, _ = started(pool)
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(8, 32)
        known = weakref.ref(x)
        with contextlib.suppress(ValueError):
            model(x, "plain")
        del x
        assert known() is None
    finally:
        gc.enable()


@pytest.mark.slow
def test_exceptions_leave_no_memory_behind(pool: WorkerPool) -> None:
    model, managed = started(pool, Net(32))
    workers = {unit.worker for unit in managed.remote_modules.values()}
    held = lambda: [(sum(line.pool.size for line in w.link.transport.buffers), len(w.mailbox.replies)) for w in workers]
    sizes: list[Any] = []
    for _ in range(12):
        for _ in range(2):
            with pytest.raises(ValueError, match="wrong"):
                model(torch.randn(1000, 32), "plain")
            with pytest.raises(ValueError, match="wrong"):
                model(torch.randn(1000, 32), "", "plain").sum().backward()
        gc.collect()
        sizes.append(held())
    assert sizes[5] == sizes[-1]


class Speaks(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.number = nn.Linear(32, 32), number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(f"unit {self.number}")
        print("to errors", file=sys.stderr)
        warnings.warn("a warning of a unit", UserWarning, stacklevel=1)
        logging.getLogger("units").info("record %d", self.number)
        logging.getLogger("units").debug("not this one")
        return self.linear(x)


def test_what_units_say_is_said_by_the_program_in_its_order(pool: WorkerPool, capsys: Any, caplog: Any) -> None:
    model, managed = started(pool, nn.Sequential(*(Speaks(at) for at in range(4))))
    capsys.readouterr()
    logging.getLogger("units").setLevel(logging.INFO)
    with caplog.at_level(logging.INFO, "units"), warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        print("before")
        model(torch.randn(2, 32))
        print("after")
    out, err = capsys.readouterr()
    assert out.split("\n")[:6] == ["before", "unit 0", "unit 1", "unit 2", "unit 3", "after"]
    assert err.count("to errors") == 4
    assert [str(one.message) for one in found] == ["a warning of a unit"] * 4
    assert [one.getMessage() for one in caplog.records if one.name == "units"] == [f"record {at}" for at in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with pytest.raises(UserWarning, match="a warning of a unit"):
            model(torch.randn(2, 32))
    assert managed.calls


class Picks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x.unsqueeze(-1) * self.weight).sum(-1)


def test_the_micro_batch_is_named(pool: WorkerPool) -> None:
    model = nn.Sequential(nn.Linear(32, 32), Picks(), nn.Linear(32, 32))
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(32))
        model[0].bias.zero_()
    managed = ManagedModel(model, pool, quiet=True, micro_batches=4)
    dispatch.manage(model, managed)
    x = torch.ones(8, 32)
    for _ in range(3):
        model(x)
    assert managed.calls
    x[5] = -1.0  # of the third micro-batch
    with pytest.raises(torch.linalg.LinAlgError) as caught:
        model(x)
    assert any("forward of 1, micro-batch 2 of 4" in add_fault_note for add_fault_note in caught.value.__notes__)
    model(torch.ones(8, 32))


class Solves(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(x.new_zeros(2, 2), x[:2, :2])  # raises


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.part = nn.Linear(32, 32), nn.ModuleDict({"solver": Solves()})

    def forward(self, x: torch.Tensor, fault: str = "", later: str = "") -> torch.Tensor:
        if fault == "solve":
            self.part["solver"](x)
        if fault == "torch":
            self.linear(x[:, 1:])
        return BackwardFault.apply(self.linear(x), later)


@pytest.mark.parametrize(
    ("fault", "later", "place", "line"),
    [
        ("solve", "", "forward of 1.part.solver, at", "torch.linalg.solve(x.new_zeros(2, 2), x[:2, :2])  # raises"),
        ("torch", "", "forward of 1.linear, at", "self.linear(x[:, 1:])"),
        ("", "shapes", "backward of 1, at", '"shapes": (lambda: torch.ones(2, 3) @ torch.ones(2, 3), RuntimeError, '),
    ],
)
def test_the_note_names_worker_module_and_line(pool: WorkerPool, fault: str, later: str, place: str, line: str) -> None:
    model = nn.ModuleList(Block() for _ in range(2))
    model.forward = lambda x, *a: model[1](model[0](x), *a)  # type: ignore[method-assign]
    _, managed = started(pool, model)
    assert len(managed.remote_modules) == 2
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(8, 32), fault, later).sum().backward()
    (add_fault_note,) = [one for one in caught.value.__notes__ if "worker" in one]
    assert add_fault_note.startswith(tuple(f"in worker {index}, {place} {__file__}:" for index in range(2)))
    assert line in add_fault_note
    at = int(add_fault_note.partition(f"{__file__}:")[2].partition(",")[0])
    assert line in Path(__file__).read_text().splitlines()[at - 1]


def test_where_notes_are_not_shown_they_are_in_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 9))
    error = rebuild_with_traceback(Raised(1, ValueError("x"), "", "Traceback …\n", b"", []), "in worker 0")
    add_fault_note(error, "saved somewhere")
    assert str(error.__cause__) == "\nTraceback …\nin worker 0\nsaved somewhere"
