"""Groups of processes: the same results as threads, bitwise equal on all shards; a lost shard ends the wait."""

import multiprocessing
import os
import time

import pytest
import torch
import torch.distributed as dist

from gemini.collectives.hosts_group import HostsGroup
from gemini.collectives.native_group import NativeGroup, join_process_group
from gemini.collectives.shard_group import CollectiveMismatchError, GroupLostError
from gemini.collectives.shared_memory_group import SharedMemoryGroup, allocate_group
from gemini.collectives.thread_group import run_shards
from gemini.errors import WorkerError
from gemini.tensor_parallel.layouts import Shard

pytestmark = pytest.mark.dist


def collectives(group):
    """One of each, on tensors of several sizes; uneven slices, large ones, other types."""
    generator = torch.Generator().manual_seed(group.rank)
    found = []
    for shape in ((3,), (), (0, 4), (40, 300), (1 << 16,)):
        x = torch.randn(shape, generator=generator)
        found += [group.all_reduce(x), group.maximum(x), group.all_reduce(x.bfloat16())]
    x = torch.randn(12, 6, generator=generator)
    found.append(group.reduce_scatter(x, Shard(0, 2)))
    units = 2 * group.size + 1
    found.append(group.all_gather(torch.randn(3 - (group.rank > 0), 3, generator=generator), Shard(0), units))
    found.append(group.all_gather(x.t() > 0, Shard(0)))
    rows = 12 // group.size
    found.append(group.all_to_all(torch.randn(rows, 12, generator=generator), Shard(0), Shard(1, 1, 3)))
    return found


def in_processes(size, work, *arguments):
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def run(rank):
        torch.set_num_threads(1)
        results.put((rank, work(rank, size, *arguments)))
        os._exit(0)

    processes = [context.Process(target=run, args=(rank,)) for rank in range(size)]
    for process in processes:
        process.start()
    found = dict(results.get() for _ in processes)
    for process in processes:
        process.join()
    return [found[rank] for rank in range(size)]


def over_memory(rank, size, descriptor):
    return [one.float().numpy() for one in collectives(SharedMemoryGroup(descriptor, rank, size))]


def over_gloo(rank, size, path):
    store = dist.FileStore(str(path), size)
    return [one.float().numpy() for one in collectives(HostsGroup(store, rank, size, "127.0.0.1", 60))]


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("slot", [1 << 20, 4096])  # larger tensors than a slot cross in pieces
def test_shared_memory(size, slot):
    descriptor = allocate_group(size, slot)
    compare(in_processes(size, over_memory, descriptor), size)
    os.close(descriptor)


@pytest.mark.parametrize("size", [2, 3])
def test_gloo(size, tmp_path):
    compare(in_processes(size, over_gloo, tmp_path / "store"), size)


def over_native_gloo(rank, size, path):
    """The code that runs over NCCL on GPUs, over gloo."""
    store = dist.FileStore(str(path), size)
    group = NativeGroup(dist.ProcessGroupGloo(store, rank, size), rank, size, torch.device("cpu"))
    group.barrier()
    found = [one.float().numpy() for one in collectives(group)]
    group.count("another", torch.ones(rank + 1, 1))  # only its name and type count
    group.barrier()
    group.count(f"of shard {rank}", torch.ones(1))
    try:
        group.barrier()
    except CollectiveMismatchError:
        return found
    return []


@pytest.mark.parametrize("size", [2, 3])
def test_native_collectives(size, tmp_path):
    compare(in_processes(size, over_native_gloo, tmp_path / "store"), size, rtol=1e-5)


def test_the_device_decides_about_the_library(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    assert isinstance(join_process_group(store, 0, 1, "127.0.0.1", 60, torch.device("cpu")), HostsGroup)
    if not dist.is_nccl_available():
        with pytest.raises(WorkerError, match=r"no NCCL(?s:.*)name CPUs in device_mapping"):
            join_process_group(store, 0, 1, "127.0.0.1", 60, torch.device("cuda"))


def compare(found, size, rtol=0.0):
    expected = run_shards(size, collectives)
    for mine, reference in zip(found, expected, strict=True):
        for one, other in zip(mine, reference, strict=True):
            close = 0.02 if rtol and other.dtype is torch.bfloat16 else rtol
            torch.testing.assert_close(torch.from_numpy(one), other.float(), rtol=close, atol=close)


def wait_for_the_lost(rank, size, descriptor):
    began = time.monotonic()

    def check():
        if time.monotonic() - began > 0.3:
            raise GroupLostError("the step was abandoned")

    group = SharedMemoryGroup(descriptor, rank, size, check)
    group.all_reduce(torch.ones(3))
    if rank:
        return "gone"
    try:
        group.all_reduce(torch.ones(3))
    except GroupLostError:
        return time.monotonic() - began < 2
    return False


def test_a_wait_ends_when_the_step_is_abandoned():
    descriptor = allocate_group(2, 4096)
    assert in_processes(2, wait_for_the_lost, descriptor) == [True, "gone"]
    os.close(descriptor)
