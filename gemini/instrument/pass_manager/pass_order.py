"""Pass order: topological by `needs`, else as the passes were added."""

from __future__ import annotations

from collections.abc import Sequence

from gemini.errors import Fault, PassError
from gemini.instrument.passes.base import Pass
from gemini.nearest_name import remedy


def order_in_levels(passes: Sequence[Pass]) -> list[list[Pass]]:
    """Group the passes into levels, each of which needs only earlier levels; raise `PassError` with every fault."""
    by_name = {one.name: one for one in passes}
    faults = [
        Fault(f"pass {one.name!r} needs {need!r}, which is not among the passes", remedy(need, by_name))
        for one in passes
        for need in one.needs
        if need not in by_name
    ]
    cycle = _cycle(by_name)
    if cycle:
        faults.append(Fault(f"passes need each other in a cycle: {' → '.join(cycle)}", "drop one of these needs"))
    if faults:
        raise PassError("\n".join(["the passes cannot be ordered", *(f"  - {fault}" for fault in faults)]))
    depth: dict[str, int] = {}
    for one in passes:
        _depth(one, by_name, depth)
    made: list[list[Pass]] = [[] for _ in range(max(depth.values(), default=-1) + 1)]
    for one in passes:
        made[depth[one.name]].append(one)
    return made


def _depth(one: Pass, by_name: dict[str, Pass], depth: dict[str, int]) -> int:
    if one.name not in depth:
        depth[one.name] = 1 + max((_depth(by_name[need], by_name, depth) for need in one.needs), default=-1)
    return depth[one.name]


def _cycle(by_name: dict[str, Pass]) -> list[str]:
    """Return the names along one cycle of needs, the first one also last; empty without a cycle."""
    done: set[str] = set()

    def follow(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name in done or name not in by_name:
            return []
        for need in by_name[name].needs:
            found = follow(need, [*path, name])
            if found:
                return found
        done.add(name)
        return []

    for name in by_name:
        found = follow(name, [])
        if found:
            return found
    return []
