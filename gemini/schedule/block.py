"""A block: the work that one micro-batch does in one part of the model.

A placement is a set of blocks on devices for *one* micro-batch; a schedule holds a copy of each block for every
micro-batch. Copies share `gid` (which block of the placement) and differ in `mid` (which micro-batch).

Every block has a short name that parses back, in the words of torch.distributed.pipelining:

    2F0     stage 2, forward, micro-batch 0
    1I3     stage 1, input gradient, micro-batch 3         B: both gradients at once
    1W3     stage 1, weight gradient, micro-batch 3
    0(loss)5   stage 0, a user-defined type, micro-batch 5
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from gemini.errors import Fault, PlacementError

Number = int | float

FORWARD = "forward"
BACKWARD = "backward"
INPUT_GRADIENT = "input_gradient"
WEIGHT_GRADIENT = "weight_gradient"

LETTERS = {FORWARD: "F", BACKWARD: "B", INPUT_GRADIENT: "I", WEIGHT_GRADIENT: "W"}
_TYPES = {letter: btype for btype, letter in LETTERS.items()}
_ACTION = re.compile(r"(?P<stage>\d+)(?:(?P<letter>[FBIW])|\((?P<type>[^()]+)\))(?P<mid>\d+)")


def canonical_type(btype: str) -> str:
    """Normalize a block type: `Forward`, `FORWARD` and `f` become `forward`; custom types are lower-cased."""
    word = re.sub(r"[\s\-]+", "_", btype.strip()).lower() if isinstance(btype, str) else ""
    if not word or "(" in word or ")" in word:
        raise PlacementError(
            f"block type {btype!r} is no name, or has a parenthesis\n"
            f"    → use one of {', '.join(LETTERS)} or a name of your own"
        )
    return _TYPES.get(word.upper(), word)


@dataclass(frozen=True, order=True)
class Action:
    """The name of a block: stage, type and micro-batch. `str` and `Action.parse` are inverse."""

    stage: int
    btype: str
    mid: int

    def __str__(self) -> str:
        return f"{self.stage}{LETTERS.get(self.btype) or f'({self.btype})'}{self.mid}"

    @staticmethod
    def parse(text: str) -> Action:
        """Read `2F0`, `1I3` or `0(loss)5`."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise PlacementError(
                f"{text!r} is not an action\n    → write stage, type and micro-batch, as in 2F0, 1I3, 1W3 or 0(loss)5"
            )
        btype = _TYPES[match["letter"]] if match["letter"] else canonical_type(match["type"])
        return Action(int(match["stage"]), btype, int(match["mid"]))


class Block:
    """One part of the model at work on one micro-batch.

    `span` is its duration and `memory` the amount it allocates (+) or releases (−) on each of its devices, counted
    from its start; since a device runs one block at a time, a release at the start or at the end yields the same
    peak. (Inference releases nothing: see `SchedPlan.keeps_memory`.) `before` and `after` are the blocks it depends on
    and that depend on it; `nbytes[previous]` is the size of the transfer along that edge.
    """

    __slots__ = ("after", "before", "btype", "gid", "memory", "mid", "nbytes", "span", "stage")

    def __init__(
        self,
        mid: int,
        span: Number,
        memory: Number,
        btype: str,
        *,
        stage: int | None = None,
        gid: int | None = None,
    ) -> None:
        mid, span, memory = plain_number(mid), plain_number(span), plain_number(memory)
        faults = []
        if isinstance(mid, bool) or not isinstance(mid, int) or mid < 0:
            faults.append(Fault(f"micro-batch {mid!r} of a block", "number micro-batches 0, 1, 2, …"))
        if not is_number(span) or span <= 0:
            faults.append(Fault(f"span {span!r} of a {btype} block", "give a time above zero"))
        if not is_number(memory):
            faults.append(Fault(f"memory {memory!r} of a {btype} block", "give a finite number (negative releases)"))
        if faults:
            raise PlacementError("\n".join(str(fault) for fault in faults))
        self.mid = mid
        self.span = span
        self.memory = memory
        self.btype = canonical_type(btype)
        self.stage = stage
        self.gid = gid
        self.before: dict[Block, None] = {}
        self.after: dict[Block, None] = {}
        self.nbytes: dict[Block, Number] = {}

    @staticmethod
    def make_dependency(prev: Block, next: Block, nbytes: Number = 0) -> None:
        """`next` starts only when `prev` has ended (and `nbytes` have travelled, where links cost time)."""
        if prev is next:
            raise PlacementError(f"block {prev} cannot depend on itself\n    → remove that dependency")
        if prev.mid != next.mid:
            raise PlacementError(
                f"{prev} and {next} belong to different micro-batches\n"
                f"    → micro-batches are independent; connect blocks of one of them"
            )
        if not is_number(nbytes) or nbytes < 0:
            raise PlacementError(f"{nbytes!r} bytes from {prev} to {next}\n    → give a number of bytes, 0 or more")
        prev.after[next] = None
        next.before[prev] = None
        if nbytes:
            next.nbytes[prev] = nbytes

    @property
    def action(self) -> Action:
        """The block's short name as a value."""
        return Action(self.stage or 0, self.btype, self.mid)

    def like(self, mid: int) -> Block:
        """The same block for micro-batch `mid`, without dependencies."""
        if isinstance(mid, bool) or not isinstance(mid, int) or mid < 0:
            raise PlacementError(f"micro-batch {mid!r} of a block\n    → number micro-batches 0, 1, 2, …")
        twin = Block.__new__(Block)  # skips the checks of __init__, which the original passed
        twin.mid, twin.span, twin.memory, twin.btype = mid, self.span, self.memory, self.btype
        twin.stage, twin.gid = self.stage, self.gid
        twin.before, twin.after, twin.nbytes = {}, {}, {}
        return twin

    def __repr__(self) -> str:
        return str(self.action)


def plain_number(value: Any) -> Any:
    """Convert numbers of other libraries, such as NumPy, to Python numbers; return anything else unchanged."""
    if isinstance(value, (int, float)) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def is_number(value: object) -> bool:
    """Whether a value can be a time or an amount of memory: a finite integer or real."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all reals
        return False
