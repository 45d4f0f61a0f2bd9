"""Filling: a block without items gets one, so that every worker that is asked for has something to run.

The nearest block with items to spare passes one on; blocks in between pass on in turn.

    before   █ █ █ │ █ │   │ █ █          after   █ █ │ █ │ █ │ █ █
                   └───►───┘
"""

from __future__ import annotations

from gemini.partition.local_search.search_state import State


def fill_blocks(state: State) -> None:
    """Fill the blocks of workers without items, where edges and pins allow it."""
    for block, worker in enumerate(state.worker_of):
        if not state.members[worker] and not _passed_on(state, block, -1):
            _passed_on(state, block, 1)


def _passed_on(state: State, empty: int, side: int) -> bool:
    """Pass items on towards an empty block, from its left (−1) or its right (1)."""
    done: list[tuple[int, int]] = []
    target, source = empty, empty + side
    while 0 <= source < len(state.worker_of):
        at = _spare(state, source, target)
        if at is None:
            break
        done.append((at, source))
        state.move(at, target)
        if source in state.block_of:
            return True
        target, source = source, source + side
    for at, before in reversed(done):
        state.move(at, before)
    return False


def _spare(state: State, source: int, target: int) -> int | None:
    """The lightest item of a block that may go to the next one."""
    worker = state.worker_of[target]
    able = []
    for at, block in enumerate(state.block_of):
        if block == source and state.problem.items[at].pin in (None, worker):
            low, high = state.span(at)
            if low <= target <= high:
                able.append(at)
    return min(able, key=lambda at: (state.ms[at] == 0, state.ms[at], at), default=None)
