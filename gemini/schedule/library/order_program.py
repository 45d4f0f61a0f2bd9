"""Order program: the order of a device as a list of (count, steps).

    [(3, "F0"), (1, "F0 B0"), (3, "B0")]      1F1B on the first of four devices, four micro-batches

A step is a letter and a chunk of the device: `F1` is the next forward of chunk 1, `I1` its next input gradient, `W1`
the oldest pending weight gradient of chunk 1, `w` the oldest of any chunk, and `B1` a full backward
(which is `I1` and its own weight gradient at once where the backward is split). A step for which no micro-batch is
left, or no weight gradient is pending, is skipped; so the same program serves any number of micro-batches.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT, Action

Program = Sequence[tuple[int, str]]


def run_program(program: Program, stages: Sequence[int], nmicros: int, *, split: bool) -> list[Action]:
    """The actions of a device whose chunks are `stages`."""
    actions: list[Action] = []
    count: Counter[str] = Counter()
    owed: deque[Action] = deque()

    def weight(stage: int | None) -> None:
        for action in owed:
            if stage is None or action.stage == stage:
                owed.remove(action)
                actions.append(action)
                return

    def gradient(stage: int, kind: str, whole: bool) -> None:
        mid = count[kind]
        count[kind] += 1
        if not split:
            actions.append(Action(stage, BACKWARD, mid))
            return
        actions.append(Action(stage, INPUT_GRADIENT, mid))
        later = Action(stage, WEIGHT_GRADIENT, mid)
        (actions if whole else owed).append(later)

    for times, steps in program:
        for step in steps.split() * max(0, times):
            letter, stage = step[0], stages[int(step[1:])] if step[1:] else None
            if letter == "F" and stage is not None and count[step] < nmicros:
                actions.append(Action(stage, FORWARD, count[step]))
                count[step] += 1
            elif letter in "BI" and stage is not None and count[f"B{step[1:]}"] < nmicros:
                gradient(stage, f"B{step[1:]}", letter == "B")
            elif letter in "Ww":
                weight(stage)
    return actions
