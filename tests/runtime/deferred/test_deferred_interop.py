"""Deferred tensors work with compilers, extensions, other tensor subclasses and other processes."""

from __future__ import annotations

import functools
import os
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gemini.runtime.deferred import AppliedFunction, DeferredTensor, PendingCall, pending_queue
from gemini.runtime.deferred.deferred_tensor import public_type
from gemini.runtime.deferred.tape_recorder import record
from tests import models
from tests.programs.deferred_values import PROGRAMS, Clamped
from tests.runtime.deferred.rig import Session, compare


@pytest.mark.parametrize("mode", ["eager", "overlapped"])
def test_a_compiled_loss_gets_real_tensors(mode: str) -> None:
    @torch.compile(backend="eager")
    def loss_of(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits * 2, y)

    def program(s: Session) -> None:
        loss = loss_of(s.model(s.x), s.y)
        loss.backward()
        s.saw(loss.detach())
        s.update()

    compare(program, models.plain, mode)


def test_gradients_that_reach_the_object_are_sent_on() -> None:
    """As from a C++ extension, which knows nothing of `__torch_function__`."""

    def program(s: Session) -> None:
        out = s.model(s.x)
        with torch._C.DisableTorchFunctionSubclass():
            loss = torch.mul(out, out).sum()
        loss.backward()
        s.saw(loss.detach(), out.detach())
        s.update()

    for mode in ("eager", "overlapped"):
        compare(program, models.plain, mode)


def test_other_subclasses_get_contents() -> None:
    class Other(torch.Tensor):
        pass

    s = Session(models.plain(), "overlapped")
    out = s.model(s.x)
    made = out + s.t.as_subclass(Other)
    assert type(made) is Other


def test_its_class_is_that_of_a_tensor_before_and_after_it_is_real() -> None:
    @functools.singledispatch
    def kind_of(value: object) -> str:
        return type(value).__name__

    @kind_of.register
    def _(value: torch.Tensor) -> str:
        return f"tensor of {value.dim()} dimensions"

    s = Session(models.plain(), "overlapped")
    out = s.model(s.x)
    for _ in range(2):
        assert public_type(out) is torch.Tensor
        assert out.__class__ is torch.Tensor
        assert {torch.Tensor: 1}[out.__class__] == 1
        assert (type(out) == torch.Tensor, type(out).__name__) == (True, "Tensor")  # noqa: E721
        assert isinstance(out, torch.Tensor)
        assert kind_of(out) == "tensor of 2 dimensions"
        assert type(out) is DeferredTensor or out._base is None
        out.tolist()
    assert public_type(3) is int
    assert public_type(out.detach().as_subclass(torch.nn.Parameter)) is torch.nn.Parameter


def test_a_custom_function_on_the_tape_can_be_sent() -> None:
    s = Session(models.plain(), "overlapped")
    out = Clamped.apply(s.model(s.x), 0.1)
    (op,) = out._pending.tape.ops
    assert op.function == AppliedFunction(Clamped)
    assert pickle.loads(pickle.dumps(op.function)) == op.function
    assert op.function.__name__ == "Clamped.apply"


def test_a_child_process_makes_no_calls_of_its_parent() -> None:
    s = Session(models.dropout(), "eager", draws=True)
    out = s.model(s.x)
    child = os.fork()
    if not child:
        os._exit(len(pending_queue.waiting_calls()))
    assert os.waitpid(child, 0)[1] == 0
    assert len(pending_queue.waiting_calls()) == 1
    out.tolist()


def test_what_is_recorded_depends_on_kinds_of_literals() -> None:
    s = Session(models.plain(), "overlapped")
    number = s.model(s.x).argmax(1)
    assert (number * 1).dtype is torch.int64
    assert (number * 1.0).dtype is torch.float32
    assert (number * True).dtype is torch.int64
    tape = number._pending.tape
    ops = [op.form for op in tape.ops[1:]]
    assert ops[0] == ops[1]  # to Python; not to the tape
    one, other = (type(tape)(tape.outputs, tape.metas, {}, [op]) for op in tape.ops[1:3])
    other.ops[0] = type(other.ops[0])(one.ops[0].function, other.ops[0].form, one.ops[0].region, one.ops[0].results)
    assert one.signature() != other.signature()


def test_metadata_needs_no_contents() -> None:
    s = Session(models.plain(), "eager")
    out = s.model(s.x)
    assert isinstance(out, torch.Tensor)
    assert out.shape == (7, 3)
    assert (len(out), out.dim(), out.ndim, out.numel(), out.size(-1), out.stride()) == (7, 2, 2, 21, 3, (3, 1))
    assert out.requires_grad
    assert not out.is_leaf
    assert out.detach().is_leaf
    assert out.is_contiguous()
    assert not out.t().is_contiguous()
    assert out.is_floating_point()
    assert out.device == torch.device("cpu")
    assert out.view(-1, out.size(0)).shape == (3, 7)
    assert not out.argmax(1).requires_grad
    assert not out.is_cuda
    assert hash(out) == id(out)
    assert s.runs == []
    assert type(out) is DeferredTensor


def test_arguments_that_cannot_be_written_down_run_on_contents() -> None:
    s = Session(models.plain(), "overlapped")
    out = s.model(s.x)
    pending = out._pending
    assert record(pending, torch.add, (out, object()), {}) is None
    assert pending.tape.ops == []


def test_operands_are_copied_once_while_they_stay_the_same() -> None:
    s = Session(models.plain(), "overlapped")
    out = s.model(s.x)
    _ = [out + s.t, out * s.t, out - s.t]
    tape = out._pending.tape
    assert len(tape.operands) == 1
    s.t.data[0, 0] = float("nan")
    _ = [out + s.t, out * s.t]
    assert len(tape.operands) == 2
    _ = out @ s.net[2].weight
    assert any(one is s.net[2].weight for one in tape.operands.values())


def test_a_failing_op_raises_when_its_result_is_read() -> None:
    s = Session(models.plain(), "eager")
    out = s.model(s.x)
    wrong, right = F.cross_entropy(out, s.y + 7), F.cross_entropy(out, s.y)
    after = wrong * 2
    assert right.item() > 0
    for one in (wrong, after, wrong):
        with pytest.raises(IndexError, match="out of bounds"):
            one.item()


def test_an_output_of_another_kind_is_an_error() -> None:
    s = Session(models.plain(), "eager")
    out = s.model(s.x)
    s.net.append(torch.nn.Flatten(0))
    with pytest.raises(Exception, match="Sequential returned another structure"):
        out.tolist()
    with pytest.raises(Exception, match="Sequential returned another structure"):
        out.sum().item()


def test_nothing_of_ours_hides_names_of_tensors() -> None:
    ours = {name for name in vars(DeferredTensor) if not name.startswith("_")}
    assert ours == {"make"} or not ours & set(dir(torch.Tensor))


@pytest.mark.parametrize("dtype", [torch.float16])
def test_half_precision_is_not_differentiated_before_it_is_scaled(dtype: Any) -> None:
    s = Session(models.single(), "overlapped")
    with torch.autocast("cpu", dtype):
        loss = F.cross_entropy(s.model(s.x.float()), s.y)
    loss.item()
    assert s.runs == ["eager"]


@pytest.mark.filterwarnings("ignore")
def test_ops_of_all_programs_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[Any, Any] = {}
    run = PendingCall.run

    def watched(self: PendingCall, root: int, is_plain_backward: bool = False) -> bool:
        seen.update((op.function, op) for op in self.tape.ops)
        return run(self, root, is_plain_backward)

    monkeypatch.setattr(PendingCall, "run", watched)
    for program, make in PROGRAMS.values():
        compare(program, make, "overlapped", steps=1)
    assert len(seen) > 50
    for op in seen.values():
        assert pickle.loads(pickle.dumps(op)) == op
