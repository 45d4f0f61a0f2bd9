"""Device orders: a schedule built only from the order of the actions on each device.

    placement       0F → 1F → 1B → 0B        one micro-batch
    orders          ["0F0", "0F1", "0B0", "0B1"]      actions of device 0
                    ["1F0", "1B0", "1F1", "1B1"]      actions of device 1

Times are the earliest that order and dependencies allow, as the runtime starts them.
"""

from __future__ import annotations

from collections.abc import Sequence

from gemini.errors import Fault, InvalidPlanError, PlacementError
from gemini.schedule.block import Action, Block, Number
from gemini.schedule.schedplan import SchedPlan, connect


def plan_from_orders(placement: SchedPlan, orders: Sequence[Sequence[Action | str]]) -> SchedPlan:
    """The schedule in which device `d` takes the actions `orders[d]` one after the other, as early as possible.

    Every action names a block of `placement` by stage and type; a block on several devices is in all their orders.
    """
    actions = [[Action.parse(item) if isinstance(item, str) else item for item in row] for row in orders]
    originals = {(block.stage, block.btype): block for block in placement.all_blocks()}
    _check(placement, actions, originals)
    micros: dict[int, dict[Block, Block]] = {}
    for action in sorted({action for row in actions for action in row}):
        original = originals[action.stage, action.btype]
        micros.setdefault(action.mid, {})[original] = original.like(action.mid)
    for twins in micros.values():
        connect(twins)
    queues = [[micros[action.mid][originals[action.stage, action.btype]] for action in row] for row in actions]
    return _run(placement, {twin: block for twins in micros.values() for block, twin in twins.items()}, queues)


def _run(placement: SchedPlan, originals: dict[Block, Block], queues: list[list[Block]]) -> SchedPlan:
    """Let every device start the next block of its queue as soon as its inputs are ready."""
    plan = SchedPlan(placement.ndevs)
    plan.links, plan.memory, plan.placement = placement.links, placement.memory, placement
    position = [0] * len(queues)
    free: list[Number] = [0] * len(queues)
    to_try = list(range(len(queues)))
    while to_try:
        device = to_try.pop()
        if position[device] == len(queues[device]):
            continue
        block = queues[device][position[device]]
        devices = placement.device(originals[block])
        heads = all(position[dev] < len(queues[dev]) and queues[dev][position[dev]] is block for dev in devices)
        if not heads or any(prev not in plan for prev in block.before):
            continue
        arrivals = [
            plan.step(prev) + prev.span + placement.delay(originals[prev], originals[block]) for prev in block.before
        ]
        start = max([*arrivals, *(free[dev] for dev in devices)])
        plan.add_block(block, devices, start)
        for dev in devices:
            position[dev] += 1
            free[dev] = start + block.span
        to_try.extend(devices)
        to_try.extend(dev for later in block.after for dev in placement.device(originals[later]))
    stuck = [queue[at] for queue, at in zip(queues, position) if at < len(queue)]
    if stuck:
        raise InvalidPlanError(_deadlock(plan, queues, position))
    return plan


def _deadlock(plan: SchedPlan, queues: list[list[Block]], position: list[int]) -> str:
    lines = ["deadlock: with this order no device can go on"]
    for device, (queue, at) in enumerate(zip(queues, position)):
        if at < len(queue):
            missing = [str(prev) for prev in queue[at].before if prev not in plan]
            reason = "needs " + ", ".join(missing) if missing else "waits for the other devices of the block"
            lines.append(f"  device {device} is at {queue[at]}, which {reason}")
    return "\n".join([*lines[:20], "    → move the required block earlier in the order of its device"])


def _check(
    placement: SchedPlan, actions: Sequence[Sequence[Action]], originals: dict[tuple[int | None, str], Block]
) -> None:
    faults = []
    if len(originals) < len(placement):
        names = [str(block) for block in placement.all_blocks() if originals[block.stage, block.btype] is not block]
        faults.append(Fault(f"{', '.join(names)} names two blocks of the placement", "give each its own `stage`"))
    if len(actions) != placement.ndevs:
        faults.append(
            Fault(f"{len(actions)} rows for a placement on {placement.ndevs} devices", "give one row a device")
        )
    for device, row in enumerate(actions):
        seen: set[Action] = set()
        for action in row:
            original = originals.get((action.stage, action.btype))
            if original is None:
                faults.append(Fault(f"device {device}: {action} is no block of the placement", _valid_names(originals)))
            elif device not in placement.device(original):
                places = ", ".join(map(str, placement.device(original)))
                faults.append(Fault(f"device {device}: {action} is placed on {places}", "move it to that row"))
            if action in seen:
                faults.append(Fault(f"device {device}: {action} comes twice", "keep one of them"))
            seen.add(action)
    if faults:
        raise PlacementError("\n".join(str(fault) for fault in faults[:20]))


def _valid_names(originals: dict[tuple[int | None, str], Block]) -> str:
    names = [str(block) for block in originals.values()]
    return "it has " + ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
