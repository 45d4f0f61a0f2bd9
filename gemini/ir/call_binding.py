"""Call binding: a call of the model in one canonical form.

`model(x, None, labels=y)`, `model(x, labels=y)` and `model(input=x, labels=y)` are one call. Arguments are named by
the parameters of `forward`; an argument that equals its default `None` is dropped. A `ModelCall` also decomposes the
nested arguments, so that the call can be repeated with other tensors.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Iterable
from collections.abc import Sequence as SequenceType
from functools import cached_property
from operator import is_
from typing import Any

import torch
from torch import nn

from gemini.ir.encode import Encoder, UnsupportedValueError, decode, tensors, walk
from gemini.ir.pytree import Form, Literal, Ref, leaves, value_text


def bind(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments by name; unchanged where they do not fit the signature (the model raises its own error)."""
    try:
        known = _signature(model.forward)
        shape = (len(args), *kwargs)
        order = known.orders.get(shape)
        if order is not None:
            values = (*args, *kwargs.values())
            return {name: values[at] for name, at, is_optional in order if not (is_optional and values[at] is None)}
        bound = known.signature.bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    known.learn(shape, kwargs)
    named: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        parameter = known.signature.parameters[name]
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            named[name] = tuple(value)
        elif not (value is None and parameter.default is None):
            named[name] = value
    return dict(sorted(named.items()))


class _Signature:
    """The signature of a function, the objects it was read from, and the argument order of call shapes seen before."""

    def __init__(self, forward: Any, facts: list[Any]) -> None:
        self.signature, self.facts = inspect.signature(forward), facts
        # Key: the number of positional arguments and the keyword names. Value, sorted by name: the name, its position
        # among all arguments, and whether it is dropped if it is None.
        self.orders: dict[tuple[Any, ...], list[tuple[str, int, bool]]] = {}

    def learn(self, shape: tuple[Any, ...], named: Iterable[str]) -> None:
        """Cache the argument order of a call shape that fits the signature."""
        parameters = self.signature.parameters
        if len(self.orders) >= _MAX_SHAPES or any(one.kind in _VARIABLE for one in parameters.values()):
            return
        names = [*[*parameters][: shape[0]], *named]
        self.orders[shape] = [(name, names.index(name), parameters[name].default is None) for name in sorted(names)]


_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_MAX_SHAPES = 1024  # cached call shapes
_signatures: weakref.WeakKeyDictionary[Any, _Signature] = weakref.WeakKeyDictionary()


def _signature(forward: Any) -> _Signature:
    """Return the signature of a forward method; those of classes are cached, since inspecting one is slow."""
    function = forward.__func__ if type(forward) is types.MethodType else None
    facts = _facts(function)
    if not facts:
        return _Signature(forward, facts)
    known = _signatures.get(function)
    if known is None or len(known.facts) != len(facts) or not all(map(is_, known.facts, facts)):
        known = _signatures[function] = _Signature(forward, facts)
    return known


def _facts(function: Any) -> list[Any]:
    """Return the objects that determine the signature of a function; empty where they are unknown."""
    found: list[Any] = []
    while type(function) is types.FunctionType and "__signature__" not in vars(function):
        found += (function.__code__, function.__defaults__, function.__kwdefaults__)
        if "__wrapped__" not in vars(function):
            return found
        function = vars(function)["__wrapped__"]
    return []


class _LenientEncoder(Encoder):
    """Keeps live objects that have no form: the call is repeated in this process only."""

    def _container(self, value: Any, depth: int) -> Form:
        try:
            return super()._container(value, depth)
        except UnsupportedValueError:
            return Literal(value)

    def _callable(self, value: Any, depth: int) -> Form:  # noqa: ARG002
        return Literal(value)


_plain_forms: dict[tuple[Any, ...], Form] = {}  # of calls whose arguments are all tensors


class ModelCall:
    """One call of the model, repeatable with other tensors."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        # Where all arguments are tensors: the number of positional ones and the keyword names, which fix the form.
        self.plain: tuple[Any, ...] | None = None
        if all(isinstance(value, torch.Tensor) for value in (*args, *kwargs.values())):
            self.plain = (len(args), *kwargs)
            form = _plain_forms.get(self.plain)
            if form is not None:
                self.tensors += (*args, *kwargs.values())
                self.form = form
                return
        self.form = _LenientEncoder(self._collect, lambda _: None)((tuple(args), dict(kwargs)))
        if self.plain is not None and len(_plain_forms) < _MAX_SHAPES:
            _plain_forms[self.plain] = self.form

    @cached_property
    def metadata_key(self) -> tuple[Any, ...] | None:
        """A key equal for calls that differ in contents only; None where an argument is not a tensor."""
        if self.plain is None:
            return None
        facts = tuple((one.dtype, one.device, one.requires_grad, one.shape) for one in self.tensors)
        return self.plain, facts

    def _collect(self, tensor: torch.Tensor) -> Ref:
        self.tensors.append(tensor)
        return Ref(len(self.tensors) - 1)

    @property
    def shared_arguments(self) -> list[Any]:
        """The arguments that repeated calls share: live objects, not copies."""
        return [leaf.value for leaf in leaves(self.form) if isinstance(leaf, Literal)]

    def arguments(self, inputs: SequenceType[torch.Tensor] | None = None) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with fresh copies of the tensors: writes of the model do not reach the originals."""
        return self.with_tensors([fresh_copy(tensor) for tensor in (self.tensors if inputs is None else inputs)])

    def with_tensors(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with these tensors in place of the original ones."""
        if self.plain is not None:
            count, *names = self.plain
            return tuple(tensors[:count]), dict(zip(names, tensors[count:], strict=True))
        args, kwargs = decode(self.form, lambda ref: tensors[ref.node])
        return args, kwargs


def fresh_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a leaf tensor with the same contents, strides and gradient flag."""
    copy = tensor.detach().clone()
    return copy.requires_grad_(tensor.requires_grad)


def signature_of(bound: dict[str, Any]) -> tuple[tuple[Any, ...], ...]:
    """Return the part of a call that a graph depends on: structure, plain values, and tensor metadata."""
    facts: list[tuple[Any, ...]] = []
    for path, leaf in walk(bound):
        where = ".".join(str(step[1]) for step in path)
        if isinstance(leaf, torch.Tensor):
            facts.append((where, str(leaf.dtype), str(leaf.device), leaf.requires_grad, tuple(leaf.shape)))
        else:
            facts.append((where, type(leaf).__name__, value_text(leaf)))
    return tuple(facts)


__all__ = ["ModelCall", "bind", "fresh_copy", "signature_of", "tensors"]
