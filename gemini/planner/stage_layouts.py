"""Stage layouts: assignments of stages to workers that a schedule is searched for.

straight     0 1 2 3               one stage per worker
looped       0 1 2 3 0 1 2 3       several, round robin: shorter bubbles, more transfers
vee          0 1 2 3 3 2 1 0       two, forth and back: the loss is on the worker of the inputs
free         the best balance of the partitioner
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gemini.errors import PartitionError
from gemini.ir.graph import Graph
from gemini.partition import partition
from gemini.partition.assignment import Partition
from gemini.partition.partition_options import Options
from gemini.profiling.profile_result import Profile

Model = tuple[Graph, Profile]


def enumerate_layouts(
    graph: Graph, profile: Profile, nparts: int, partitioner: str, options: Options, *, most_chunks: int = 2
) -> Iterator[Partition]:
    """Yield the partitions to try, the simplest first.

    Raises the first PartitionError where there is no partition at all.
    """
    seen: set[tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]] = set()
    failure: PartitionError | None = None
    for one in _attempts((graph, profile), nparts, partitioner, options, most_chunks):
        if isinstance(one, PartitionError):
            failure = failure or one
        elif (one.stages, one.workers) not in seen:
            seen.add((one.stages, one.workers))
            yield one
    if not seen and failure is not None:
        raise failure


def _attempts(
    model: Model, nparts: int, partitioner: str, options: Options, most_chunks: int
) -> Iterator[Partition | PartitionError]:
    yield _try_partition(model, nparts, partitioner, options)
    if nparts == 1 or partitioner != "exact":
        return
    options = replace(options, rivals=False)  # the heuristics have run
    yield _try_partition(model, nparts, partitioner, replace(options, mixed=False))
    for chunks in range(2, most_chunks + 1):
        yield _try_partition(model, nparts, partitioner, replace(options, chunks=chunks))
    if most_chunks > 1 and not options.workers and not options.pins:
        found = _try_partition(model, 2 * nparts, "exact", replace(options, mixed=False))
        if isinstance(found, PartitionError) or found.nstages != 2 * nparts:
            return
        forth = tuple(range(nparts))
        for workers in ((*forth, *forth), (*forth, *forth[::-1])):
            yield replace(found, nparts=nparts, workers=workers)


def _try_partition(model: Model, nparts: int, name: str, options: Options) -> Partition | PartitionError:
    try:
        return partition(*model, nparts, name, options)
    except PartitionError as error:
        return error
