"""Custom autograd functions, analysed by tracing their forward and their backward.

A function splits if its forward keeps samples separate and its backward, for sharded output gradients, returns sharded
gradients of sharded arguments and sums over samples for replicated ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from gemini.batch_analysis.analysis_steps import AnalysisStep, InheritedRefusal
from gemini.batch_analysis.batch_kinds import Kind, Opaque, Partial, Replicate, Shard
from gemini.batch_analysis.leaf_trace import trace_inside
from gemini.batch_analysis.op_call import AnalysisRefused, SampleCount, TensorValue, UnknownNumber, leaves
from gemini.batch_analysis.propagate import KindInterpreter
from gemini.capture.trace_state import TraceRefused
from gemini.ir.import_paths import Symbol
from gemini.ir.node import EMPTY_KWARGS, Node
from gemini.ir.op_targets import find_call
from gemini.ir.pytree import Ref, SequenceForm


def analyze_autograd_function(node: Node, interpreter: KindInterpreter, statement: AnalysisStep) -> list[Kind]:
    """Return the kinds of the results of a custom autograd function."""
    args, kwargs = interpreter.arguments(statement)
    given = [leaf for leaf in leaves((args, kwargs)) if isinstance(leaf, TensorValue)]
    for value in given:
        if isinstance(value.kind, Opaque):
            raise InheritedRefusal(value.kind.reason)
    if all(value.is_constant for value in given) and not node.random:
        return [Replicate()] * len(statement.results)
    what = "a custom autograd function"
    boxed = [arg for arg in args if isinstance(arg, (list, tuple, dict))]
    if kwargs or any(isinstance(leaf, (TensorValue, SampleCount, UnknownNumber)) for leaf in leaves(boxed)):
        raise AnalysisRefused(f"{what} with arguments in containers")
    if any(not isinstance(value.kind, (Replicate, Shard)) for value in given):
        raise AnalysisRefused(f"{what} of arguments that are neither sharded nor replicated")
    module, _, name = node.target.partition(":")
    try:
        cls = Symbol(module, name).resolve()
        forward: list[Kind] = trace_inside(replace(node, kwargs=EMPTY_KWARGS), _Forward(cls, args), interpreter)
        _check_backward(cls, node, interpreter, statement, args, forward)
    except TraceRefused as coarse:
        raise AnalysisRefused(f"{what} whose Python is not followed: {coarse.reason}") from None
    except AnalysisRefused as refused:
        raise AnalysisRefused(f"{what}: {refused}") from None
    except Exception as error:
        raise AnalysisRefused(f"{what}; tracing it raised {type(error).__name__}: {error!s:.80}") from error
    return forward


class _ScriptedSource(nn.Module):  # type: ignore[misc]
    """The Python source of a function that TorchScript compiled, as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.__dict__["function"] = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return its result."""
        return self.function(*args, **kwargs)


def analyze_scripted_function(node: Node, interpreter: KindInterpreter) -> list[Kind] | None:
    """Return the kinds of the results of a function compiled by TorchScript; None for any other opaque function."""
    owner, name = find_call(node.target)
    python = getattr(getattr(owner, name, None), "_torchdynamo_inline", None)
    if python is None:
        return None
    try:
        found: list[Kind] = trace_inside(node, _ScriptedSource(python), interpreter)
    except TraceRefused as coarse:
        raise AnalysisRefused(f"a compiled function whose Python is not followed: {coarse.reason}") from None
    except AnalysisRefused:
        raise
    except Exception as error:
        raise AnalysisRefused(
            f"a compiled function; tracing it raised {type(error).__name__}: {error!s:.80}"
        ) from error
    return found


class _Context:
    """Replaces the context that torch passes to a function."""

    def __init__(self, needed: tuple[bool, ...]) -> None:
        self.needs_input_grad = needed
        self.saved_tensors: tuple[Any, ...] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors for the backward."""
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Any) -> None:
        """Do nothing: the analysis does not depend on it."""

    def set_materialize_grads(self, value: bool) -> None:
        """Do nothing: the analysis does not depend on it."""


class _Forward(nn.Module):  # type: ignore[misc]
    """The forward of a function as a module."""

    def __init__(self, cls: Any, args: tuple[Any, ...]) -> None:
        super().__init__()
        self.cls = cls
        self.needed = tuple(isinstance(arg, TensorValue) and arg.grad for arg in args)

    def run(self, args: tuple[Any, ...]) -> tuple[_Context, Any]:
        """Return the context and the result."""
        context = _Context(self.needed)
        if self.cls.setup_context is not torch.autograd.function._SingleLevelFunction.setup_context:
            made = self.cls.forward(*args)
            self.cls.setup_context(context, args, made)
            return context, made
        return context, self.cls.forward(context, *args)

    def forward(self, *args: Any) -> Any:
        """Return the result."""
        with torch.no_grad():
            return self.run(args)[1]


class _GradientPositions:
    """Arguments that the last backward returned gradients of; outside the module, which a trace must not change."""

    last: ClassVar[list[int]] = []


class _Backward(_Forward):
    """Forward and backward of a function as a module; returns the gradients that are tensors."""

    def forward(self, *args: Any) -> Any:
        """Return the gradients of the arguments; the gradients of the results follow the arguments."""
        count = len(self.needed)
        with torch.no_grad():
            context, _ = self.run(args[:count])
            found = self.cls.backward(context, *args[count:])
        listed = found if isinstance(found, tuple) else (found,)
        places = [at for at, one in enumerate(listed) if isinstance(one, torch.Tensor) and self.needed[at]]
        _GradientPositions.last = places
        return tuple(listed[at] for at in places)


def _check_backward(  # noqa: PLR0917
    cls: Any, node: Node, interpreter: KindInterpreter, statement: AnalysisStep, args: Any, kinds: list[Kind]
) -> None:
    """Refuse a function whose gradients are not per sample."""
    extra = []
    for at, ((_, result), kind) in enumerate(zip(statement.results, kinds, strict=True)):
        ref = Ref(-1 - at)
        interpreter.values[ref] = TensorValue(ref, kind, result.shape, result.dtype, sized=result.batch)
        extra.append(ref)
    form: Any = node.args
    longer = replace(node, args=SequenceForm(tuple, (*form.items, *extra), form.label), kwargs=EMPTY_KWARGS)
    try:
        found = trace_inside(longer, _Backward(cls, args), interpreter)
    finally:
        for ref in extra:
            del interpreter.values[ref]
    for at, kind in zip(_GradientPositions.last, found, strict=True):
        wanted = Partial() if args[at].is_constant else args[at].kind
        if kind != wanted:
            raise AnalysisRefused("its backward mixes samples")
