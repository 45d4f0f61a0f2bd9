"""The programs of `bench_hosts.py`, as they run on a host."""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from overlap_models import WORKLOADS

_BYTES = 16 << 20


def measure_cluster(place: str, other: str, rounds: int) -> dict[str, Any]:
    """Compare one host and two."""
    import gemini
    from gemini import GeminiConfig
    from gemini.runtime.interception import dispatch
    from gemini.runtime.protocol import MeasureLink

    torch.manual_seed(0)
    gpt = WORKLOADS["gpt"]
    batch, targets = gpt.batch(8), gpt.targets(8)
    models, began, ready_s = [], time.perf_counter(), 0.0
    for settings in (
        {"device_mapping": {"stage_0": {"shard_0": "cpu"}, "stage_1": {"shard_0": f"{other}/cpu"}}, "cluster": place},
        {"pipeline_degree": 2, "mode": "pipeline"},
    ):
        torch.manual_seed(0)
        model = gpt.make(8)
        gemini.compile(model, GeminiConfig(accum_degree=8, schedule="1f1b", quiet=True, strict=True, **settings))
        ready_s = ready_s or time.perf_counter() - began
        models.append((model, torch.optim.SGD(model.parameters(), 1e-2), [], []))
    torch.manual_seed(0)
    alone = gpt.make(8)
    models.append((alone, torch.optim.SGD(alone.parameters(), 1e-2), [], []))
    known = dispatch.find_managed(models[0][0])
    assert known is not None
    assert known.pipelined is not None
    predicted = 0.0
    for at in range(rounds + 3):
        for model, optimizer, times, losses in models:
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = gpt.loss(model(batch), targets)
            loss.backward()
            optimizer.step()
            times.append((time.perf_counter() - start) * 1e3)
            losses.append(loss.item())
        if at == 1:
            ((_, (kind,)),) = known.pipelined.plans.kinds.items()
            predicted = kind.plan.analysis.step_ms
    worker = next(one for one in known.pool.workers if one.is_remote)

    def exchange(nbytes: int, count: int) -> float:
        payload, found = torch.zeros(nbytes, dtype=torch.uint8), []
        for _ in range(count):
            start = time.perf_counter()
            worker.ask(MeasureLink(worker.next_number(), payload), "measure")
            found.append((time.perf_counter() - start) * 1e3)
        return statistics.median(found[1:])

    pairs = zip(models[0][0].parameters(), alone.parameters(), strict=True)
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    difference = max(difference, *(abs(a - b) / abs(b) for a, b in zip(models[0][3], models[2][3], strict=True)))
    return {
        "ready_s": ready_s, "call_ms": exchange(8, 50), "large_ms": exchange(_BYTES, 12) / 2,
        "two_hosts_ms": models[0][2][3:], "one_host_ms": models[1][2][3:], "process_ms": models[2][2][3:],
        "schedule": kind.plan.name, "predicted_ms": predicted,
        "step_ms": statistics.median(known.pipelined.journal.last_ms), "difference": difference,
    }  # fmt: skip


def measure_gloo(rank: int, master: str, own: str) -> dict[str, Any]:
    """Exchange 16 MB with the other rank; return the time one way."""
    import torch.distributed as dist

    store = dist.TCPStore(master, 29591, is_master=not rank, wait_for_workers=False, timeout=timedelta(seconds=60))
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    group = dist.ProcessGroupGloo(store, rank, 2, options)
    message, found = torch.zeros(_BYTES, dtype=torch.uint8), []
    for _ in range(12):
        start = time.perf_counter()
        for sender in (0, 1):
            (group.send if sender == rank else group.recv)([message], 1 - rank, sender).wait()
        found.append((time.perf_counter() - start) * 500)
    return {"ms": statistics.median(found[1:])}


def measure_nodes() -> dict[str, Any]:
    """Train as any script does; return the samples per second of the last steps."""
    torch.manual_seed(0)
    gpt = WORKLOADS["gpt"]
    model, batch, targets, times = gpt.make(8), gpt.batch(8), gpt.targets(8), []
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    for _ in range(10):
        start = time.perf_counter()
        loss = gpt.loss(model(batch), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        times.append(time.perf_counter() - start)
    return {"samples_per_s": len(batch) / statistics.median(times[4:]), "loss": loss.item()}


if __name__ == "__main__":
    purpose, *rest = sys.argv[1:]
    if purpose == "cluster":
        result = measure_cluster(rest[0], rest[1], int(rest[2]))
    elif purpose == "gloo":
        result = measure_gloo(int(rest[0]), rest[1], rest[2])
    else:
        result = measure_nodes()
    print(json.dumps(result), flush=True)
