"""Two models may share a tensor: workers use its latest storage."""

from __future__ import annotations

import gc
import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import nn

from gemini.runtime.memory.shared_parameters import SharedParameters
from gemini.runtime.pool.worker_pool import WorkerPool


def test_models_that_have_a_tensor_in_common_use_one_position_of_it(pool: WorkerPool) -> None:
    shared = nn.Parameter(torch.arange(3.0))
    one, other = (SharedParameters(pool, torch.device("cpu")) for _ in range(2))
    device, held = pool.workers[0].device, pool.workers[0].link.shared_numbers
    one.share([shared])
    first = held[id(shared)]
    other.share([shared])
    assert held[id(shared)] == first
    shared.data = shared.data + 1  # new memory, while the former is still held
    backup = one._shared[id(shared)][0].view[:]
    before = one.relocations
    assert other.ensure_shared([shared], device)
    second = held[id(shared)]
    assert second != first
    assert one.ensure_shared([shared], device) or one.relocations != before  # its workers are sent the tensor again
    assert held[id(shared)] == second
    del one
    gc.collect()
    assert not other.ensure_shared([shared], device)
    assert held[id(shared)] == second
    assert (shared.tolist(), backup.tolist()) == ([1.0, 2.0, 3.0], [0.0, 1.0, 2.0])


def test_weights_that_the_program_keeps_are_not_written_over(pool: WorkerPool) -> None:
    weight = nn.Parameter(torch.zeros(3))
    household, device = SharedParameters(pool, torch.device("cpu")), pool.workers[0].device
    household.share([weight])
    numbers = set()
    for value in range(4):
        backup, weight.data = weight.data, torch.full((3,), 7.0 + value)
        assert household.ensure_shared([weight], device)
        numbers.add(pool.workers[0].link.shared_numbers[id(weight)])
        assert (backup.tolist(), weight.tolist()) == ([value] * 3, [7.0 + value] * 3)
        weight.data = backup
        assert household.ensure_shared([weight], device)
        numbers.add(pool.workers[0].link.shared_numbers[id(weight)])
        del backup
        weight.data = weight.data + 1  # nobody looks at its home now
        assert not household.ensure_shared([weight], device)
    assert len(numbers) == 2
    assert weight.tolist() == [4.0] * 3


def test_micro_batches_bring_weights_home_once(pool: WorkerPool) -> None:
    weights = [nn.Parameter(torch.zeros(3)) for _ in range(8)]
    household, device = SharedParameters(pool, torch.device("cpu")), pool.workers[0].device
    household.share(weights)
    backups = [weight.data for weight in weights]
    for weight in weights:
        weight.data = torch.ones(3)
    together = threading.Barrier(4)

    def bring(_: int) -> bool:
        together.wait()
        return household.ensure_shared(weights, device)

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(bring, range(4))) == 1
    assert [one.tolist() for one in backups] == [[0.0] * 3] * 8
