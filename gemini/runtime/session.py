"""Session: starts workers for a model by its configuration. Models of one configuration share their workers."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path

import torch
from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.config.host_address import is_address
from gemini.errors import ConfigError, Fault
from gemini.log import log_line
from gemini.parallel_program.compiled_plans import load_compiled_plans
from gemini.planner.config_planner import Planner
from gemini.runtime.devices.host_memory import MB, available_memory, format_bytes
from gemini.runtime.devices.worker_devices import assign_devices, model_device
from gemini.runtime.hosts.host_cluster import open_cluster
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.live_line import start_live_line
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import get_journal

_EMPTY = 155 * MB  # private memory of a CPU worker at its start
_PoolKey = tuple[int, tuple[str, ...], float, tuple[str, str]]
_pools: weakref.WeakValueDictionary[_PoolKey, WorkerPool] = weakref.WeakValueDictionary()


def start(
    model: nn.Module,
    config: GeminiConfig,
    planner: Planner | None = None,
    *,
    announce: bool = True,
    survives: bool = False,
) -> ManagedModel | None:
    """Manage a model: from its second call on, modules run in workers, and whole steps where a planner is passed.

    Returns None where the model stays in this process. Without `announce` only problems are logged; with `survives` the
    loss of a worker does not raise, and the model continues in this process.
    """
    known = dispatch.find_managed(model)
    if known is not None:
        return known
    _check_replicated(model, config)
    count = config.worker_count
    if count < 2 and config.cluster is None:
        _log(config, f"{type(model).__name__} runs in this process: the configuration requests {count} worker")
        return None
    if sys.platform != "linux":
        _log(config, f"{type(model).__name__} runs in this process: workers need Linux, this is {sys.platform}")
        return None
    devices = assign_devices(model, config, count)
    pool = _get_pool(devices, config, str(model_device(model)), in_background=survives)
    managed = ManagedModel(model, pool, config.quiet, config.accum_degree or 1, config.strict)
    managed.replicates = config.data_parallel == "replicated"
    managed.announces, managed.record.survives = announce, survives and not config.strict
    folder = Path(config.run_folder).resolve()
    managed.record.folder = folder / "failures"
    journals = get_journal(folder, config.quiet)
    journal = managed.journal = journals.add_model(managed.name, count)
    journal.settings = config.differences()
    if planner is not None and _exchange_values(pool):
        managed.pipelined = PipelinedModel(
            managed, planner, journal, folder / "traces" if config.trace else None, verify=config.verify,
            record_path=folder / "plans" / f"{os.getpid()}-{len(journals.models)}.json",
        )  # fmt: skip
        if config.program is not None:
            plans = load_compiled_plans(Path(config.program).resolve(), config.quiet)
            managed.pipelined.plans.has_edits = bool(plans.edited)
        # On CPUs the weights are in this process as well, and a local call is faster than eager dispatch.
        managed.dispatches = any(worker.device.kind != "cpu" for worker in pool.workers)
    if config.live:
        start_live_line()
    dispatch.manage(model, managed)
    return managed


def _check_replicated(model: nn.Module, config: GeminiConfig) -> None:
    """Refuse replicated data parallelism where it would have no effect, or cannot be right."""
    if config.data_parallel != "replicated":
        return
    config.check_replicated()
    sparse = next((name for name, one in model.named_modules() if getattr(one, "sparse", False)), None)
    if sparse is not None:
        what = f"data_parallel = 'replicated', and {sparse} of {type(model).__name__} has sparse gradients"
        raise ConfigError([Fault(what, "leave data_parallel out: the script's host runs the optimizer")])


def _exchange_values(pool: WorkerPool) -> bool:
    """Whether the workers can run the stages of a plan: they share memory, or are on several hosts."""
    here = {worker.device.name for worker in pool.workers if not worker.is_remote}
    return len(here) < 2 and len({worker.device.kind for worker in pool.workers}) == 1


def _get_pool(devices: list[str], config: GeminiConfig, home: str, *, in_background: bool) -> WorkerPool:
    """Return the worker pool of this process; a forked process creates its own. It lives as long as a model uses it."""
    has_remote = any(map(is_address, devices))
    where = (config.cluster or "", home) if has_remote else ("", "")
    key = os.getpid(), tuple(devices), config.watchdog, where
    found = _pools.get(key)
    if found is None or found.loss:
        cluster = open_cluster(config) if has_remote else None
        try:
            devices = cluster.place(devices, config.shard_count) if cluster is not None else devices
            local = sum(not is_address(name) for name in devices)
            _check_room(local)
        except BaseException:
            if cluster is not None:
                cluster.close()
            raise
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, local))
        if has_remote:  # the same everywhere, or sums round differently
            threads = min(threads, torch.get_num_threads())
        found = _pools[key] = WorkerPool(
            len(devices), threads, config.watchdog, devices, home, in_background=in_background, cluster=cluster
        )
    return found


def _check_room(count: int) -> None:
    """Refuse workers that do not fit into memory, before any is started."""
    left = available_memory()
    if left is not None and count * _EMPTY > left[0]:
        text = (
            f"{count} workers on this host need {format_bytes(count * _EMPTY)} before a model is installed, "
            f"{format_bytes(left[0])} {left[1]} is available"
        )
        most = max(1, int(left[0] / (2 * _EMPTY)))
        raise ConfigError([Fault(text, f"request {most} or fewer (pipeline_degree, sharding_size, workers)")])


def _log(config: GeminiConfig, text: str) -> None:
    if not config.quiet:
        log_line(f"gemini: {text}")
