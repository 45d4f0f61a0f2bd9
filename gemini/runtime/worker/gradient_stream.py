"""Gradient stream: gradients leave a worker that shares no memory in buckets, while its backward goes on.

    backward    ── block 3 ── block 2 ── block 1 ── end
    leave              └─ bucket 1  └─ bucket 2  └─ the rest, with the reply

Steps of one kind add to a parameter equally often. A gradient is therefore complete when it has had as many parts as in
the last step. One that gets a further part nevertheless is sent again with the reply, which counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from gemini.runtime.worker.gradient_buffers import LooseGradients

_BUCKET = 4 << 20  # bytes


class StreamedGradients(LooseGradients):
    """The gradients of one worker in one step; `send` is called with the parameters of a bucket.

    `parts` counts the parts of each gradient in the last step of the kind, by identity of the parameter.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        parts: dict[int, int],
        send: Callable[[list[torch.Tensor]], None],
    ) -> None:
        super().__init__(parameters)
        self._expected, self._send = parts, send
        self.parts: dict[int, int] = {}
        self._in_writing: torch.Tensor | None = None  # the parameter whose gradient `into` returned last
        self._bucket: list[torch.Tensor] = []
        self._size = 0
        self._sent: dict[int, tuple[torch.Tensor, int]] = {}  # gradients with their versions, by identity
        self._hooks: list[Any] = [
            one.register_post_accumulate_grad_hook(self._add_part) for one in self._parameters if one.requires_grad
        ]

    def into(self, parameter: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the tensor to add to, which is written before the next call."""
        self._finish_writing()
        self._in_writing = parameter
        return super().into(parameter)

    def _finish_writing(self) -> None:
        written, self._in_writing = self._in_writing, None
        if written is not None:
            self._count_part(written)

    def _add_part(self, parameter: torch.Tensor) -> None:
        """Count a part that autograd has added."""
        self._finish_writing()
        self._count_part(parameter)

    def _count_part(self, parameter: torch.Tensor) -> None:
        key, grad = id(parameter), parameter.grad
        self.parts[key] = count = self.parts.get(key, 0) + 1
        if grad is None or grad.layout is not torch.strided or count != self._expected.get(key):
            return
        self._bucket.append(parameter)
        self._size += grad.nbytes
        if self._size >= _BUCKET:
            self._send(self._bucket)
            self._sent.update(
                (id(one.grad), (one.grad, one.grad._version)) for one in self._bucket if one.grad is not None
            )
            self._bucket, self._size = [], 0

    def is_loose(self, gradient: torch.Tensor) -> bool:
        """Whether a gradient travels with the reply: it has not been sent, or has changed since."""
        sent = self._sent.get(id(gradient))
        return sent is None or sent[1] != gradient._version

    def end(self) -> None:
        """End the stream: no gradient changes from now on."""
        self._finish_writing()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def hand_over(self) -> list[Any]:
        """Free the gradients that have been sent; all others are among the tensors of the reply."""
        for parameter in self._parameters:
            parameter.grad = None
        self._sent = {}
        return []

    def discard(self) -> None:
        """Free the gradients of a failed step."""
        self.end()
        super().discard()
