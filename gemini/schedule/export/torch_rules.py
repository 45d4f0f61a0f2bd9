"""Which plans torch.distributed.pipelining can run.

Its runtime supports one chain of stages 0 … S−1, each on one rank:

    0F → 1F → … → (S−1)F → (S−1)B → … → 1B → 0B          B = whole backward, or I with W after it

A plan must have exactly these dependencies.
"""

from __future__ import annotations

from gemini.errors import Fault, PlacementError
from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, LETTERS, WEIGHT_GRADIENT, Action, Block
from gemini.schedule.schedplan import SchedPlan
from gemini.schedule.validate import find_faults

MOST_FAULTS_SHOWN = 8
_GRADIENT = (BACKWARD, INPUT_GRADIENT)


def check_exportable(plan: SchedPlan) -> None:
    """Raise `PlacementError` with every fault that prevents torch's runtime from executing `plan`."""
    faults = _block_faults(plan) or _stage_faults(plan) or _dependency_faults(plan) or _order_faults(plan)
    if faults:
        shown = [f"  - {fault}" for fault in faults[:MOST_FAULTS_SHOWN]]
        more = len(faults) - len(shown)
        tail = [f"  … and {more} more"] if more else []
        raise PlacementError("\n".join(["torch.distributed.pipelining cannot run this plan", *shown, *tail]))


def _block_faults(plan: SchedPlan) -> list[Fault]:
    """Faults of single blocks: a type or a number of devices that torch does not support, or a duplicate name."""
    faults = []
    seen: set[Action] = set()
    for block in plan.all_blocks():
        devices = plan.device(block)
        if block.btype not in LETTERS:
            faults.append(Fault(f"{block} has the type {block.btype!r}", f"it knows only {', '.join(LETTERS)}"))
        elif len(devices) > 1:
            where = ", ".join(map(str, devices))
            faults.append(Fault(f"{block} runs on devices {where} together", "it takes stages on one rank each"))
        elif block.action in seen:
            faults.append(Fault(f"{block} names two blocks", "give each block its own `stage`"))
        seen.add(block.action)
    if not seen:
        faults.append(Fault("the plan is empty", "add blocks, or compose a schedule"))
    return faults


def _stage_faults(plan: SchedPlan) -> list[Fault]:
    """Faults of stages: gaps in the numbers, moving between devices, devices without any, missing passes."""
    faults = []
    home: dict[int, int] = {}
    for block in plan.all_blocks():
        (device,) = plan.device(block)
        first = home.setdefault(block.action.stage, device)
        if first != device:
            faults.append(
                Fault(f"{block} is on device {device}, its stage began on device {first}", "keep a stage on one device")
            )
    absent = sorted(set(range(max(home) + 1)) - set(home))
    if absent:
        faults.append(Fault(f"no blocks of stages {absent}", "number the stages 0, 1, 2, … without gaps"))
    idle = sorted(set(range(plan.ndevs)) - set(home.values()))
    if idle:
        faults.append(Fault(f"no blocks on devices {idle}", "give every rank a stage"))
    return faults or _pass_faults(plan, sorted(home))


def _pass_faults(plan: SchedPlan, stages: list[int]) -> list[Fault]:
    """Every stage runs every micro-batch forward and, whole or in two halves, backward."""
    there = {block.action for block in plan.all_blocks()}
    faults = []
    for mid in range(1 + max(action.mid for action in there)):
        for stage in stages:
            has = {btype for btype in LETTERS if Action(stage, btype, mid) in there}
            if has not in ({FORWARD, BACKWARD}, {FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT}):
                found = ", ".join(str(Action(stage, btype, mid)) for btype in LETTERS if btype in has) or "nothing"
                faults.append(
                    Fault(
                        f"stage {stage}, micro-batch {mid}: found {found}",
                        f"it needs {stage}F{mid} with {stage}B{mid}, or with {stage}I{mid} and {stage}W{mid}",
                    )
                )
    return faults


def _dependency_faults(plan: SchedPlan) -> list[Fault]:
    """Dependencies that torch does not respect, and steps of its chain that the plan lacks."""
    blocks = {block.action: block for block in plan.all_blocks()}
    last = max(action.stage for action in blocks)
    faults = []
    for block in blocks.values():
        for prev in block.before:
            if prev in plan and not _moves(prev, block):
                faults.append(Fault(f"{block} depends on {prev}", _remedy(prev, block)))
        needed = _find_input(block, blocks, last)
        if needed is not None and needed not in block.before and not _is_implied(needed, block):
            faults.append(
                Fault(
                    f"{block} does not depend on {needed}, which torch runs first",
                    "it can only run one chain of stages; connect these blocks or use another runtime",
                )
            )
    return faults


def _order_faults(plan: SchedPlan) -> list[Fault]:
    """Blocks that overlap or precede their inputs: their order on the device would not be the plan's."""
    order_rules = ("times", "dependencies", "exclusivity")
    return [Fault(str(fault), "see SchedPlan.validate") for fault in find_faults(plan) if fault.rule in order_rules]


def _moves(prev: Block, block: Block) -> bool:
    """Whether torch respects the dependency of `block` on `prev`."""
    step = block.action.stage - prev.action.stage
    if step == 0:
        return prev.btype == FORWARD or (prev.btype == INPUT_GRADIENT and block.btype == WEIGHT_GRADIENT)
    if prev.btype == FORWARD:
        return step == 1 and block.btype == FORWARD
    return step == -1 and prev.btype in _GRADIENT and block.btype in _GRADIENT


def _remedy(prev: Block, block: Block) -> str:
    if abs(block.action.stage - prev.action.stage) > 1:
        return "it only moves tensors between neighbouring stages"
    if prev.btype == WEIGHT_GRADIENT:
        return f"it runs weight gradients last; depend on {Action(prev.action.stage, INPUT_GRADIENT, prev.mid)} instead"
    return "it moves activations to the next stage and gradients to the previous one"


def _find_input(block: Block, blocks: dict[Action, Block], last: int) -> Block | None:
    """The one block whose result torch passes to `block`."""
    stage, mid = block.action.stage, block.mid
    if block.btype == FORWARD:
        return blocks[Action(stage - 1, FORWARD, mid)] if stage else None
    if block.btype == WEIGHT_GRADIENT:
        return blocks[Action(stage, INPUT_GRADIENT, mid)]
    if stage == last:
        return blocks[Action(stage, FORWARD, mid)]
    return blocks.get(Action(stage + 1, BACKWARD, mid)) or blocks[Action(stage + 1, INPUT_GRADIENT, mid)]


def _is_implied(needed: Block, block: Block) -> bool:
    """Whether `block` depends on `needed` transitively."""
    reached, ahead = set(), list(block.before)
    while ahead:
        prev = ahead.pop()
        if prev is needed:
            return True
        if prev not in reached:
            reached.add(prev)
            ahead.extend(prev.before)
    return False
