"""Gradients leave as soon as they are complete; those that change afterwards are sent again."""

from __future__ import annotations

import torch
from torch import nn

from gemini.runtime.worker.gradient_stream import StreamedGradients


def make(count: int = 3) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1200, 1200)) for _ in range(count)]


def test_complete_gradients_leave_during_the_backward() -> None:
    parameters, sent = make(), list[nn.Parameter]()
    for expected in ([], [parameters[2], parameters[1], parameters[0]]):
        sent.clear()
        parts = {id(one): 1 for one in expected}
        stream = StreamedGradients(parameters, parts, sent.extend)  # type: ignore[arg-type]
        value = torch.ones(1200)
        for parameter in parameters:
            value = parameter @ value
        value.sum().backward()
        stream.end()
        assert [id(one) for one in sent] == [id(one) for one in expected]
        assert stream.parts == {id(one): 1 for one in parameters}
        assert [stream.is_loose(one.grad) for one in parameters if one.grad is not None] == [not expected] * 3
        stream.hand_over()
        assert all(one.grad is None for one in parameters)


def test_a_gradient_with_a_further_part_is_sent_again() -> None:
    (parameter,), sent = make(1), list[float]()
    stream = StreamedGradients([parameter], {id(parameter): 1}, lambda bucket: sent.append(bucket[0].grad[0, 0].item()))  # type: ignore[index]
    parameter.sum().backward()
    total, is_first = stream.into(parameter)
    assert not is_first
    total.add_(1)
    stream.end()
    assert parameter.grad is not None
    assert (sent, stream.is_loose(parameter.grad), parameter.grad[0, 0]) == ([1.0], True, 2.0)
