"""A cached call binding binds later calls exactly as `inspect` would, for any values."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gemini.ir.call_binding import ModelCall, bind
from gemini.ir.encode import decode

VALUES = st.one_of(st.none(), st.integers(0, 3), st.just("text"))


class Fixed(nn.Module):
    """With defaults that are None, and others."""

    def forward(self, x: Any, mask: Any = None, *, labels: Any = None, flag: Any = 3) -> Any:
        """What it was given."""
        return x, mask, labels, flag


class Open(nn.Module):
    """With any number of arguments."""

    def forward(self, x: Any, *more: Any, **named: Any) -> Any:
        """What it was given."""
        return x, more, named


def plainly(model: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """As Python binds them."""
    signature = inspect.signature(model.forward)
    try:
        bound = signature.bind(*args, **kwargs).arguments
    except TypeError:
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    named = {}
    for name, value in bound.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        elif not (value is None and signature.parameters[name].default is None):
            named[name] = value
    return dict(sorted(named.items()))


@given(
    st.sampled_from([Fixed(), Open()]),
    st.lists(VALUES, max_size=3),
    st.dictionaries(st.sampled_from(["x", "mask", "labels", "flag", "other"]), VALUES, max_size=3),
)
def test_every_call_is_bound_as_python_does(model: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> None:
    for _ in range(2):
        found = bind(model, tuple(args), kwargs)
        assert found == plainly(model, tuple(args), kwargs)
        assert [*found] == [*plainly(model, tuple(args), kwargs)]


def test_calls_of_tensors_have_the_form_of_the_first() -> None:
    """The form is shared, the tensors are each call's own, and the call can be made again."""
    calls = []
    for _ in range(2):
        args, kwargs = (torch.randn(2), torch.randn(3)), {"mask": torch.randn(1)}
        call = ModelCall(args, kwargs)
        assert decode(call.form, lambda ref, call=call: call.tensors[ref.node]) == (args, kwargs)
        calls.append(call)
    assert calls[0].form == calls[1].form
    assert calls[0].metadata_key == calls[1].metadata_key
    assert ModelCall((torch.randn(2), 1), {}).metadata_key is None
    assert (
        ModelCall((torch.randn(2),), {}).metadata_key
        != ModelCall((torch.randn(3),), {}).metadata_key
        != ModelCall((torch.ones(3).int(),), {}).metadata_key
    )
