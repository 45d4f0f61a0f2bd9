"""Stage shards: what a stage needs to run as one shard of several: its group, its slices, its own buffers.

A parameter that is divided becomes a leaf on the shard's part of the one shared memory: it changes with every optimizer
step, and nothing is copied. Buffers that the stage writes are written to shared memory by shard 0 only; the others
write to copies, which are renewed before each step.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from gemini.collectives.shard_group import CollectiveMismatchError
from gemini.tensor_parallel.layouts import Shard
from gemini.tensor_parallel.local_graph import parameter_slice

if TYPE_CHECKING:
    from gemini.collectives.shard_group import ShardGroup
    from gemini.tensor_parallel.layouts import Layout


class ShardedStages(NamedTuple):
    """Sent with the stages of a program: how a worker takes part in them.

    `groups` are the workers of each stage that has several, by shard; `layouts` those of parameters that are not simply
    whole, by number; `written` the positions of the buffers that a stage writes; `collectives` those of a stage on one
    micro-batch, forward and at most backward, by name, or None where they depend on sizes. With `are_remote`, the
    shards gather gradients: not all of them share memory with the controller.
    """

    groups: dict[int, tuple[int, ...]]
    layouts: dict[int, Any]
    written: dict[int, tuple[int, ...]]
    collectives: dict[int, tuple[dict[str, int], dict[str, int]] | None]
    are_remote: bool = False


def _text(found: Counter[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "no collectives"


def _list_weights(part: nn.Module) -> None:
    """Renew the second list that a recurrent layer has of its parameters."""
    if isinstance(part, nn.RNNBase):
        part._flat_weights = [part._parameters.get(name) for name in part._flat_weights_names]


@dataclass(frozen=True)
class ParameterShard:
    """A divided parameter: the leaf on the shard's slice, and the whole."""

    leaf: nn.Parameter
    whole: torch.Tensor
    layout: Layout
    rank: int
    size: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the slice of a tensor like the whole, such as its gradient."""
        return parameter_slice(whole, self.layout, self.size, self.rank)


class StageShards:
    """The stages of one program, as one worker takes part in them."""

    def __init__(
        self, message: ShardedStages, place: int, stages: Mapping[int, nn.Module], tensors: Mapping[int, torch.Tensor]
    ) -> None:
        self.members = message.groups  # of every stage with several shards
        self.collectives, self.are_remote = message.collectives, message.are_remote
        self.ranks = {stage: workers.index(place) for stage, workers in message.groups.items()}
        self.slices: dict[int, ParameterShard] = {}  # by identity of the leaf
        self.unreported: list[torch.Tensor] = []  # leaves whose gradients the first shard reports, or parts of these
        self.partial: list[torch.Tensor] = []  # parameters whose gradients the shards sum after the last backward
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []  # own buffers, and those in shared memory
        self.writes_buffers = {stage for stage, found in message.written.items() if found}
        self.numbers: dict[int, int] = {}
        self._separated: dict[int, nn.Parameter] = {}
        # Torch prefers gradients without gaps; those of slices have the gaps of the whole gradient.
        warnings.filterwarnings("ignore", "grad and param do not obey the gradient layout contract")
        has_single = any(stage not in self.members for stage in stages)
        for stage, module in sorted(stages.items()):
            if stage in self.members:
                if has_single and self.ranks[stage]:
                    self._separate(module, message.layouts, tensors)
                self._divide(module, self.ranks[stage], len(self.members[stage]), message.layouts, tensors)
                if self.ranks[stage]:
                    self._copy_buffers(module, message.written.get(stage, ()))

    def _divide(
        self, module: nn.Module, rank: int, size: int, layouts: Mapping[int, Any], tensors: Mapping[int, torch.Tensor]
    ) -> None:
        """Replace the divided parameters of a stage by leaves on its slices."""
        numbers = {id(tensors[number]): number for number in layouts}
        leaves = {self.numbers[key]: one.leaf for key, one in self.slices.items()}
        for part in module.modules():
            for name, whole in part._parameters.items():
                number = numbers.get(id(whole))
                if number is None:
                    continue
                if not isinstance(layouts[number], Shard):
                    if all(whole is not one for one in self.partial):
                        self.partial.append(whole)
                    continue
                if number not in leaves:
                    own = parameter_slice(whole.detach(), layouts[number], size, rank)
                    leaf = leaves[number] = nn.Parameter(own, whole.requires_grad)
                    if rank:
                        self.unreported.append(leaf)
                    self.slices[id(leaf)] = ParameterShard(leaf, whole, layouts[number], rank, size)
                    self.numbers[id(leaf)] = number
                part._parameters[name] = leaves[number]
            _list_weights(part)

    def _separate(self, module: nn.Module, layouts: Mapping[int, Any], tensors: Mapping[int, torch.Tensor]) -> None:
        """Replace whole parameters by leaves on the same memory: their gradients are those of this stage alone."""
        cut = {id(tensors[number]) for number, layout in layouts.items() if isinstance(layout, Shard)}
        partial = {id(tensors[number]) for number, layout in layouts.items() if not isinstance(layout, Shard)}
        for part in module.modules():
            for name, whole in part._parameters.items():
                if whole is None or id(whole) in cut:
                    continue
                if id(whole) not in self._separated:
                    leaf = nn.Parameter(whole.detach(), whole.requires_grad)
                    self._separated[id(whole)] = leaf
                    self.unreported.append(leaf)
                    if id(whole) in partial:
                        self.partial.append(leaf)
                part._parameters[name] = self._separated[id(whole)]
            _list_weights(part)

    def _copy_buffers(self, module: nn.Module, written: Iterable[int]) -> None:
        """Replace the buffers that a stage writes by copies."""
        at_risk = {id(one) for at, one in enumerate(module.buffers()) if at in set(written)}
        copies: dict[int, torch.Tensor] = {}
        for part in module.modules():
            for name, buffer in part._buffers.items():
                if id(buffer) in at_risk:
                    if id(buffer) not in copies:
                        copies[id(buffer)] = buffer.detach().clone()
                        self.copies.append((copies[id(buffer)], buffer))
                    part._buffers[name] = copies[id(buffer)]

    @property
    def separated(self) -> list[nn.Parameter]:
        """The leaves that stand for whole parameters in stages that another shard reports."""
        return list(self._separated.values())

    def reports(self, stage: int) -> bool:
        """Whether this worker reports the results of a stage that all its shards have: it is the first."""
        return not self.ranks.get(stage, 0)

    @contextmanager
    def check_forward(self, stage: int, group: ShardGroup | None) -> Iterator[None]:
        """Run the forward of a stage inside; raises where it does not run the collectives of the plan."""
        before = Counter[str]() if group is None else group.counted()
        yield
        if group is not None:
            found, planned = group.counted() - before, self._planned(stage, 0)
            if planned is not None and found != planned:
                raise CollectiveMismatchError(f"forward of stage {stage}: {_text(found)}, planned {_text(planned)}")

    @contextmanager
    def check_backward(self, stage: int, group: ShardGroup | None) -> Iterator[None]:
        """Run the backward of a stage inside; raises where it runs more collectives than planned."""
        before = Counter[str]() if group is None else group.counted()
        yield
        if group is not None:
            found, planned = group.counted() - before, self._planned(stage, 1)
            if planned is not None and found - planned:
                raise CollectiveMismatchError(f"backward of stage {stage}: {_text(found)}, planned {_text(planned)}")

    def _planned(self, stage: int, phase: int) -> Counter[str] | None:
        planned = self.collectives[stage]
        return None if planned is None else Counter(planned[phase])

    def begin(self, groups: Mapping[tuple[int, ...], ShardGroup]) -> None:
        """Renew the copies of buffers, before a shard writes the shared ones."""
        for own, shared in self.copies:
            own.copy_(shared)
        for members in dict.fromkeys(self.members[stage] for stage in self.writes_buffers if stage in self.members):
            groups[members].barrier()
