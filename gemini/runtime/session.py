"""Session: starts workers for a model by its configuration. Models of one configuration share their workers."""

from __future__ import annotations

import os
import sys
import weakref
from pathlib import Path

from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.config.host_address import is_address
from gemini.errors import ConfigError, Fault
from gemini.log import log_line
from gemini.parallel_program.compiled_plans import load_compiled_plans
from gemini.planner.config_planner import Planner
from gemini.runtime.devices.host_memory import MB, available_memory, format_bytes
from gemini.runtime.devices.worker_devices import assign_devices, model_device
from gemini.runtime.interception import dispatch
from gemini.runtime.interception.managed_model import ManagedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool
from gemini.runtime.run_journal import get_journal

_EMPTY = 155 * MB  # private memory of a CPU worker at its start
_pools: weakref.WeakValueDictionary[tuple[int, tuple[str, ...], float, str], WorkerPool] = weakref.WeakValueDictionary()


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
    count = config.worker_count
    if count < 2 and not _names_hosts(config):
        _log(config, f"{type(model).__name__} runs in this process: the configuration requests {count} worker")
        return None
    if sys.platform != "linux":
        _log(config, f"{type(model).__name__} runs in this process: workers need Linux, this is {sys.platform}")
        return None
    devices = assign_devices(model, config, count)
    pool = _get_pool(devices, config.watchdog, str(model_device(model)), in_background=survives)
    managed = ManagedModel(model, pool, config.quiet, config.accum_degree or 1, config.strict)
    managed.announces, managed.record.survives = announce, survives and not config.strict
    folder = Path(config.run_folder).resolve()
    managed.record.folder = folder / "failures"
    journals = get_journal(folder, config.quiet)
    journal = managed.journal = journals.add_model(managed.name, count)
    journal.settings = config.differences()
    if planner is not None and len({worker.device.name for worker in pool.workers}) == 1:
        managed.pipelined = PipelinedModel(
            managed, planner, journal, folder / "traces" if config.trace else None, verify=config.verify,
            record_path=folder / "plans" / f"{os.getpid()}-{len(journals.models)}.json",
        )  # fmt: skip
        if config.program is not None:
            plans = load_compiled_plans(Path(config.program).resolve(), config.quiet)
            managed.pipelined.plans.has_edits = bool(plans.edited)
        # On CPUs the weights are in this process as well, and a local call is faster than eager dispatch.
        managed.dispatches = any(worker.is_remote or worker.device.kind != "cpu" for worker in pool.workers)
    dispatch.manage(model, managed)
    return managed


def _names_hosts(config: GeminiConfig) -> bool:
    mapping = config.device_mapping or {}
    return any(is_address(name) for stage in mapping.values() for name in stage.values())


def _get_pool(devices: list[str], watchdog: float, home: str, *, in_background: bool) -> WorkerPool:
    """Return the worker pool of this process; a forked process creates its own. It lives as long as a model uses it."""
    local = [name for name in devices if not is_address(name)]
    key = os.getpid(), tuple(devices), watchdog, home if len(local) < len(devices) else ""
    found = _pools.get(key)
    if found is None or found.loss:
        _check_room(len(local))
        threads = max(1, len(os.sched_getaffinity(0)) // max(1, len(local)))
        found = _pools[key] = WorkerPool(len(devices), threads, watchdog, devices, home, in_background=in_background)
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
