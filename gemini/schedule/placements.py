"""Placements by name: how one micro-batch runs through the devices, for any number of them.

A shape defines the stages, their devices and their dependencies; the backward pass mirrors the
forward. With four devices (rows) and time to the right:

    vshape            xshape            mshape               kshape
    F             B   F     F B     B   F F             B B   F   F B   B
      F         B       F F     B B     F   F         B   B     F F B B
        F     B         F F     B B     F     F     B     B   F   F B   B
          F B         F     F B     B   F       F B       B     F F B B

    nnshape                nnshape_eager          mllm                   finetune             alphafold
    F F   F         B   B B   F F F         B B B   F F       F B       B B   F F             B   F   F   F       B
    F   F F         B B   B   F   F F     B B   B   F   F     F B     B   B   F   F         B      F   F   F     B
    F     F F     B B     B   F   F   F B   B   B   F     F   F B   B     B   F     F     B         F   F   F   B
    F     F   F B   B     B   …                     F       F F B B       B   F       F B            F   F   F B

    interleaved (two chunks)      vchunks (two chunks)
    F       F                     F             F B …
      F       F                     F         F
        F       F                     F     F
          F       F B …                 F F
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemini.errors import PlacementError
from gemini.nearest_name import remedy
from gemini.schedule.asap_times import asap
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Block, Number, plain_number
from gemini.schedule.schedplan import SchedPlan

PerStage = Number | Sequence[Number]


@dataclass(frozen=True)
class Stage:
    """A part of the model: where it runs, after which stages; its backward is `None` if it is not trained."""

    devices: tuple[int, ...]
    after: tuple[int, ...] = ()
    forward: Number = 1
    backward: Number | None = 3
    memory: Number = 1


@dataclass(frozen=True)
class Shape:
    """A named family of placements, one for each number of devices it admits."""

    description: str
    stages: Callable[[int, int], list[Stage]]
    counts: str = "1, 2, 3, …"
    admits: Callable[[int], bool] = lambda ndevs: ndevs >= 1
    chunked: bool = False


# ---------------------------------------------------------------------- shapes


def _chain(stages: Sequence[Stage]) -> list[Stage]:
    """Each stage after the one before it."""
    return [
        Stage(stage.devices, (index - 1,) if index else (), stage.forward, stage.backward, stage.memory)
        for index, stage in enumerate(stages)
    ]


def _line(ndevs: int, backward: Number | None = 3, memory: Number = 1) -> list[Stage]:
    return [Stage((dev,), backward=backward, memory=memory) for dev in range(ndevs)]


def _everywhere(ndevs: int, backward: Number | None = 1, memory: Number = 0) -> Stage:
    """A stage that all devices run together, such as a sharded embedding or loss."""
    return Stage(tuple(range(ndevs)), backward=backward, memory=memory)


def _xshape(ndevs: int, _: int) -> list[Stage]:
    down = _chain(_line(ndevs))
    up = [Stage((ndevs - 1 - index,), () if index == 0 else (ndevs + index - 1,)) for index in range(ndevs)]
    return down + up


def _kshape(ndevs: int, _: int) -> list[Stage]:
    half = ndevs // 2
    branches = [Stage((dev,), (dev - 1,) if dev % half else ()) for dev in range(ndevs)]
    return [*branches, Stage(tuple(range(ndevs)), (half - 1, ndevs - 1), backward=1)]


def _two_embeddings(ndevs: int, second: int) -> list[Stage]:
    line, shared = _line(ndevs), _everywhere(ndevs)
    return _chain([shared, *line[:second], shared, *line[second:]])


def _alphafold(ndevs: int, _: int) -> list[Stage]:
    recycled = _line(ndevs, backward=None, memory=0)
    return _chain([*recycled, *recycled, *_line(ndevs, backward=1)])


def _vchunks(ndevs: int, chunks: int) -> list[Stage]:
    line = _line(ndevs)
    return _chain([stage for lap in range(chunks) for stage in (line[::-1] if lap % 2 else line)])


PLACEMENTS: dict[str, Shape] = {
    "vshape": Shape("one stage per device, forward down and backward up", lambda n, _: _chain(_line(n))),
    "xshape": Shape(
        "two replicas in opposite directions, as in Chimera: a micro-batch runs down one and another up the other",
        _xshape,
        counts="2, 3, 4, …",
        admits=lambda ndevs: ndevs >= 2,
    ),
    "mshape": Shape(
        "an embedding over all devices, then one stage per device", lambda n, _: _chain([_everywhere(n), *_line(n)])
    ),
    "kshape": Shape(
        "two branches on half of the devices each, joined on all of them, as in CLIP",
        _kshape,
        counts="2, 4, 6, …",
        admits=lambda ndevs: ndevs >= 2 and ndevs % 2 == 0,
    ),
    "nnshape": Shape(
        "two embeddings over all devices, the second one midway, as in encoder-decoder models",
        lambda n, _: _two_embeddings(n, n // 2),
        counts="2, 3, 4, …",
        admits=lambda ndevs: ndevs >= 2,
    ),
    "nnshape_eager": Shape(
        "two embeddings over all devices, the second after the first stage",
        lambda n, _: _two_embeddings(n, 1),
        counts="2, 3, 4, …",
        admits=lambda ndevs: ndevs >= 2,
    ),
    "mllm": Shape(
        "an embedding and a head over all devices, one stage per device between them",
        lambda n, _: _chain([_everywhere(n), *_line(n), _everywhere(n)]),
    ),
    "finetune": Shape(
        "a frozen embedding over all devices, then one stage per device",
        lambda n, _: _chain([_everywhere(n, backward=None), *_line(n, backward=2)]),
    ),
    "alphafold": Shape("two passes without gradients, then one with, one stage per device", _alphafold),
    "interleaved": Shape(
        "several chunks per device, looped: device d holds stages d, P+d, 2P+d, …",
        lambda n, chunks: _chain(_line(n) * chunks),
        chunked=True,
    ),
    "vchunks": Shape(
        "several chunks per device, down and up in turn: device d holds stages d, 2P−1−d, …", _vchunks, chunked=True
    ),
}


# --------------------------------------------------------------------- building


def placement(
    name: str,
    ndevs: int,
    train: bool = True,
    *,
    split: bool = False,
    chunks: int | None = None,
    forward: PerStage | None = None,
    backward: PerStage | None = None,
    input_gradient: PerStage = 1,
    weight_gradient: PerStage = 1,
    memory: PerStage | None = None,
    input_release: Number = 0.5,
    nbytes: Number = 0,
) -> SchedPlan:
    """The blocks of one micro-batch for a shape of `PLACEMENTS` on `ndevs` devices; forward only unless `train`.

    `split` makes two blocks of each backward: the input gradient, which the previous stage waits for, and the weight
    gradient, on which nothing depends. Spans and memory default to those of the shape; pass one number for all stages
    (for memory: all that hold any) or one per stage. The forward allocates memory and the backward releases it, or
    half is released by the input gradient and half by the weight gradient (`input_release` is the former's share).
    `nbytes` are transferred along every edge.
    """
    shape = _shape(name, ndevs)
    stages = shape.stages(ndevs, _chunks(name, shape, chunks))
    count = len(stages)
    spans = {
        FORWARD: _each("forward", forward, [stage.forward for stage in stages]),
        BACKWARD: _each("backward", backward, [stage.backward or 0 for stage in stages]),
        INPUT_GRADIENT: _each("input_gradient", input_gradient, [1] * count),
        WEIGHT_GRADIENT: _each("weight_gradient", weight_gradient, [1] * count),
    }
    held = _stage_memory(memory, stages, train)
    if not 0 <= input_release <= 1:
        raise PlacementError(f"input_release {input_release!r}\n    → give a share from 0 to 1 of the memory")
    homes: dict[Block, tuple[int, ...]] = {}

    def add(index: int, btype: str, amount: Number) -> Block:
        block = Block(0, spans[btype][index], amount, btype, stage=index)
        homes[block] = stages[index].devices
        return block

    forwards = [add(index, FORWARD, held[index]) for index in range(count)]
    for index, stage in enumerate(stages):
        for prev in stage.after:
            Block.make_dependency(forwards[prev], forwards[index], nbytes)
    if train:
        learning = [index for index in range(count) if stages[index].backward is not None]
        gradients: dict[int, Block] = {}
        for index in reversed(learning):
            if split:
                given = held[index] * input_release if input_release else 0
                gradients[index] = add(index, INPUT_GRADIENT, -given)
                Block.make_dependency(gradients[index], add(index, WEIGHT_GRADIENT, given - held[index]))
            else:
                gradients[index] = add(index, BACKWARD, -held[index])
        _mirror(stages, forwards, gradients, nbytes)
    return _assign_times(ndevs, homes)


def _mirror(stages: list[Stage], forwards: list[Block], gradients: dict[int, Block], nbytes: Number) -> None:
    """Add the backward blocks: gradients flow along the forward edges in reverse, from the end of each flow."""
    last = set(range(len(stages))) - {prev for stage in stages for prev in stage.after}
    for index, block in gradients.items():
        if index in last:
            Block.make_dependency(forwards[index], block)
        for prev in stages[index].after:
            if prev in gradients:
                Block.make_dependency(block, gradients[prev], nbytes)


def _assign_times(ndevs: int, homes: dict[Block, tuple[int, ...]]) -> SchedPlan:
    plan = SchedPlan(ndevs)
    for gid, (block, start) in enumerate(asap(homes).items()):
        block.gid = gid
        plan.add_block(block, homes[block], start)
    return plan


def check_name(name: str) -> Shape:
    """Return the shape of a named placement; an error lists all of them."""
    shape = PLACEMENTS.get(name)
    if shape is None:
        raise PlacementError(f"no placement is called {name!r}\n    → {remedy(str(name), PLACEMENTS)}")
    return shape


def _shape(name: str, ndevs: int) -> Shape:
    shape = check_name(name)
    if isinstance(ndevs, bool) or not isinstance(ndevs, int) or not shape.admits(ndevs):
        raise PlacementError(f"{name} does not exist for {ndevs!r} devices\n    → it does for {shape.counts}")
    return shape


def _chunks(name: str, shape: Shape, chunks: int | None) -> int:
    if chunks is None:
        return 2
    if not shape.chunked or isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        chunked = ", ".join(key for key, other in PLACEMENTS.items() if other.chunked)
        raise PlacementError(f"{chunks!r} chunks for {name}\n    → give 1 or more, and only for {chunked}")
    return chunks


def _stage_memory(memory: PerStage | None, stages: list[Stage], train: bool) -> list[Number]:
    """Memory of each stage's forward; in training only where a backward releases it."""
    own = [stage.memory for stage in stages]
    memory = plain_number(memory)
    if isinstance(memory, (int, float)):
        return [memory if amount else 0 for amount in own]
    held = _each("memory", memory, own)
    kept = [index for index, stage in enumerate(stages) if train and stage.backward is None and held[index]]
    if kept:
        raise PlacementError(
            f"stages {kept} take memory but have no backward to release it\n    → give 0 as the memory of these"
        )
    return held


def _each(name: str, given: PerStage | None, default: Sequence[Number]) -> list[Number]:
    """One value per stage."""
    if given is None:
        return list(default)
    given = plain_number(given)
    if isinstance(given, (int, float)):
        return [given] * len(default)
    if len(given) != len(default):
        raise PlacementError(
            f"{len(given)} values of {name} for {len(default)} stages\n    → give one number, or one per stage"
        )
    return list(given)
