"""Replica update: a worker sums the gradients of its stages with other replicas, and optimizes its own weights.

    Step ──► gradients stay ──► SumGradients: all replicas have the sum ──► UpdateWeights: the script's optimizer

The first replica of each group hands its gradients over to the controller before they are summed: they are summed in
the same memory. The others retain theirs for the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

from gemini.collectives.shard_group import ExchangeGroup, ShardGroup
from gemini.runtime.step_messages import UpdateWeights

_BUCKET = 32 << 20  # bytes
_FLAGS = "flags of gradients"


class ReplicaGradients:
    """The gradients of one step, parameter by parameter: in the same order in all replicas."""

    def __init__(self, parameters: Sequence[torch.Tensor], *, copies: bool) -> None:
        """`copies`: their memory is given away."""
        self.parameters = [*{id(one): one for one in parameters}.values()]
        grads = [one.grad for one in self.parameters]
        self.grads = [grad.clone() if copies and grad is not None else grad for grad in grads]

    def sum(self, group: ShardGroup) -> list[int]:
        """Sum the gradients over a group; return the places of those that this replica had none of."""
        assert isinstance(group, ExchangeGroup)
        own = torch.tensor([grad is not None for grad in self.grads], dtype=torch.uint8)
        flags = torch.stack([one.clone() for one in group.exchange(own, _FLAGS)]).amax(0).tolist()
        missing = [at for at, has in enumerate(flags) if has and self.grads[at] is None]
        for at in missing:
            self.grads[at] = torch.zeros_like(self.parameters[at], requires_grad=False)
        for bucket in self._buckets():
            flat = torch.cat([grad.reshape(-1) for grad in bucket])
            total = group.sum_flat(flat.cpu()).to(flat.device)
            for grad, part in zip(bucket, total.split([grad.numel() for grad in bucket]), strict=True):
                grad.copy_(part.view(grad.shape))
        return missing

    def _buckets(self) -> Iterator[list[torch.Tensor]]:
        """Yield gradients of one dtype that are summed at once."""
        grads = [grad for grad in self.grads if grad is not None]
        for dtype in dict.fromkeys(grad.dtype for grad in grads):
            bucket, size = list[torch.Tensor](), 0
            for grad in grads:
                if grad.dtype is not dtype:
                    continue
                bucket.append(grad)
                size += grad.nbytes
                if size >= _BUCKET:
                    yield bucket
                    bucket, size = [], 0
            if bucket:
                yield bucket


class ReplicaOptimizers:
    """The script's optimizers on the replicas of their parameters."""

    def __init__(self) -> None:
        self._made: dict[tuple[int, int], torch.optim.Optimizer] = {}  # by program and optimizer

    def update(self, request: UpdateWeights, tensors: dict[int, Any], gradients: ReplicaGradients) -> None:
        """Carry out one step."""
        key = request.program, request.optimizer
        if request.state is not None:
            kind: Any = getattr(torch.optim, request.name)
            groups = [{**options, "params": [tensors[at] for at in numbers]} for numbers, options in request.groups]
            self._made[key] = kind(groups)
            for number, state in request.state:
                self._made[key].state[tensors[number]] = state
        optimizer = self._made[key]
        for group, (_, options) in zip(optimizer.param_groups, request.groups, strict=True):
            group.update(options)
        held = {id(p): grad for p, grad in zip(gradients.parameters, gradients.grads, strict=True)}
        live = {number: tensors[number] for number in request.live}
        try:
            for parameter in live.values():
                parameter.grad = held[id(parameter)]
            for numbers, most, norm, foreach in request.clips:
                clip_grad._clip_grads_with_norm_([live[at] for at in numbers], most, norm, foreach)
            optimizer.step()
        finally:
            for parameter in live.values():
                parameter.grad = None

    def forget(self, programs: list[int]) -> None:
        """Drop the optimizers of programs that will not run any more."""
        self._made = {key: one for key, one in self._made.items() if key[0] not in programs}
