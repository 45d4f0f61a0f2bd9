"""Policy: how a discovered model runs.

Forced     the configuration sets a mode, a degree or workers: every trained model runs in workers
Auto       workers where they are faster, see `auto`
DryRun     plans only, see `dry_run`
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError, GeminiError
from gemini.launcher.defaults import count_devices, fill_defaults, load_config
from gemini.launcher.model_discovery import ModelDiscovery, ReplacementCall
from gemini.log import log_line

if TYPE_CHECKING:
    from gemini.launcher.process.launch_session import Session
    from gemini.planner.config_planner import Planner
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.pipelined.pipelined_model import PipelinedModel


class ForcedPolicy:
    """Starts workers for every trained model."""

    is_lasting = True

    def __init__(self, config: GeminiConfig) -> None:
        self.config = config
        self.discovery: ModelDiscovery

    def refuses_compiled(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Never refuse: workers are requested."""
        return False

    def decide(self, model: nn.Module) -> ReplacementCall | bool | None:
        """Start workers; the model stays local if that fails."""
        return self.start(model)

    def start(  # noqa: PLR0917
        self,
        model: nn.Module,
        plan: StepPlan | None = None,
        single_ms: float | None = None,
        planning_ms: float = 0.0,
        config: GeminiConfig | None = None,
        choice: Sequence[str] = (),
    ) -> bool:
        """Start workers for a model; return whether it has them.

        `plan`, if there is one, was made in `planning_ms`; `config` and `choice` are what a search has found for it.
        """
        config = config or self.config
        self.discovery.stop_watching()
        try:
            obstacle = _find_obstacle(model)
            if obstacle:
                return self.stay_local(model, obstacle, "in this process")
            from gemini.launcher.script_api.deferred_types import see_through_deferred_tensors
            from gemini.runtime.session import start
            from gemini.snapshot.rng_snapshot import preserve_rng_state

            planner = self.planner(config)
            with preserve_rng_state():
                planner = planner and _return_first(plan, planner)
                managed = start(model, config, planner, announce=False, survives=True)
            if managed is not None and managed.pipelined is not None:
                managed.pipelined.plans.planning_ms += planning_ms
                managed.pipelined.journal.choice = list(choice)
                self._observe(model, managed.pipelined, single_ms)
                see_through_deferred_tensors()
            return managed is not None
        except Exception as error:
            if self.config.cluster is not None and isinstance(error, ConfigError):
                _end_without_cluster(error)
            if self.config.strict:
                raise
            return self.stay_local(model, _reason_of(error), "in this process")
        finally:
            self.discovery.resume()

    def planner(self, config: GeminiConfig | None = None) -> Planner | None:
        """Return the planner of whole steps under a configuration, the policy's own; None where planning is off."""
        from gemini.planner.config_planner import planner_for

        return planner_for(config or self.config)

    def _observe(self, model: nn.Module, pipelined: PipelinedModel, single_ms: float | None) -> None:
        """Print the plan of the first pipelined step; plan further kinds of calls once that repays."""
        pipelined.plans.plans_at_once = False
        pipelined.journal.local_ms = single_ms or 0.0
        pipelined.journal.places = self.discovery.places_of(model)
        reference = weakref.ref(model)

        def show(plan: StepPlan) -> None:
            if (model := reference()) is not None:
                self.show(model, plan, single_ms or pipelined.verification.local_ms or None)

        def check_loss(reason: str) -> None:
            from gemini.launcher.lost_workers import check_fits

            if (model := reference()) is not None:
                folder, optimizers = Path(self.config.run_folder).resolve(), self.discovery.find_optimizers(model)
                check_fits(model, optimizers, pipelined.plans.reported, folder, reason)

        pipelined.plans.on_first_step, pipelined.managed.on_loss = show, check_loss

    def show(self, model: nn.Module, plan: StepPlan, single_ms: float | None = None) -> None:
        """Print the summary of a plan."""
        if not self.config.quiet:
            from gemini.launcher.run_summary import show

            state_mb = self.discovery.optimizer_state_mb(model)
            show(model, plan, self.discovery.optimizers_of(model), self.config, single_ms, state_mb=state_mb)

    def stay_local(self, model: nn.Module, reason: str, how: str = "as under python") -> bool:
        """Record and print why a model runs without workers; return False."""
        from gemini.runtime.run_journal import get_journal

        name, reason = type(model).__name__, reason.partition("\n")[0]
        self.print_line(f"{name} runs {how}: {reason}")
        get_journal(Path(self.config.run_folder).resolve(), self.config.quiet).record_local(name, reason)
        return False

    def print_line(self, text: str) -> None:
        """Print one line to standard error."""
        if not self.config.quiet:
            log_line(f"gemini: {text}".partition("\n")[0])


def _return_first(plan: StepPlan | None, planner: Planner) -> Planner:
    """Return a planner whose first result is `plan`, if there is one."""
    if plan is None:
        return planner
    first = [plan]

    def plan_step(model: nn.Module, args: Any, kwargs: Any, **changes: Any) -> StepPlan:
        return first.pop() if first else planner(model, args, kwargs, **changes)

    return plan_step


def _find_obstacle(model: nn.Module) -> str:
    """Return why a model cannot have workers; empty if it can."""
    import torch

    if isinstance(model, torch.jit.ScriptModule):
        return "it is compiled by torch.jit"
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        return "the program already trains it in several processes (torch.distributed)"
    return ""


def _count_hosts(config: GeminiConfig) -> Callable[[], int]:
    from gemini.runtime.hosts.host_cluster import count_hosts

    def count() -> int:
        try:
            return count_hosts(config)
        except ConfigError as error:
            _end_without_cluster(error)

    return count


def _end_without_cluster(error: ConfigError) -> NoReturn:
    """End a program that should run on a cluster, and cannot: it is not meant for this host alone."""
    from gemini.launcher import torch_import_hook

    torch_import_hook.state.session = None  # the run is over: no summary
    log_line(f"gemini_python: {error}")
    raise SystemExit(2)


def policy_for(session: Session, folder: str) -> ForcedPolicy:
    """Return the policy of a session."""
    config = load_config(session, folder)
    if config.program is not None and "check" not in session:
        _check_program(config)
    is_requested, micro_batches = config.asks_for_workers, config.accum_degree
    config = fill_defaults(config, _count_hosts(config) if config.cluster is not None else count_devices)
    if config.dry_run:
        from gemini.launcher.dry_run import DryRunPolicy

        return DryRunPolicy(config)
    check = session.get("check")
    if check is not None:
        from gemini.launcher.checking_policy import CheckingPolicy

        return CheckingPolicy(config, Path(check))
    record = session.get("record")
    if record is not None:
        from gemini.launcher.recording_policy import RecordingPolicy

        return RecordingPolicy(config, Path(record), session["record_steps"])
    if is_requested:
        return ForcedPolicy(config)
    from gemini.launcher.auto import AutoPolicy

    return AutoPolicy(config, micro_batches)


def _check_program(config: GeminiConfig) -> None:
    """End the program where the files of its parallel form cannot be used: it would run without them."""
    from gemini.parallel_program.compiled_plans import load_compiled_plans

    try:
        load_compiled_plans(Path(config.program or "").resolve(), config.quiet)
    except GeminiError as error:
        raise SystemExit(f"gemini: {error}") from error


def _reason_of(error: Exception) -> str:
    """Return the reason of an error, its first fault."""
    if isinstance(error, ConfigError) and error.faults:
        return error.faults[0].what
    return f"{type(error).__name__}: {error}"
