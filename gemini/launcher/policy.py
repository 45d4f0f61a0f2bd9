"""Deciding: what becomes of a model that was found.

Forced     a mode, a degree or workers were asked for: every model that is trained runs in workers
Auto       see `auto`
DryRun     see `dry_run`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError
from gemini.launcher.defaults import completed
from gemini.launcher.model_discovery import Instead, Recognition
from gemini.log import tell

if TYPE_CHECKING:
    from gemini.launcher.process.launch_session import Session
    from gemini.planner.step_plan import StepPlan
    from gemini.runtime.pipelined.call_signature import Planner

Told = Callable[["StepPlan"], None]


class Forced:
    """Every model that is trained runs in workers."""

    is_lasting = True

    def __init__(self, config: GeminiConfig) -> None:
        self.config = config
        self.recognition: Recognition

    def refuses_compiled(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Never: workers were asked for."""
        return False

    def decide(self, model: nn.Module) -> Instead | bool | None:
        """Start it. What fails of ours leaves it in this process."""
        return self.start(model)

    def start(self, model: nn.Module, plan: StepPlan | None = None, single_ms: float | None = None) -> bool:
        """Workers for a model, with a plan that was made for it, if any; whether it has them now."""
        self.recognition.stop_watching()
        try:
            obstacle = _obstacle(model)
            if obstacle:
                return self.stays(model, obstacle, "in this process")
            from gemini.runtime.session import start
            from gemini.snapshot.rng_snapshot import preserve_rng_state

            planner = self.planner()
            with preserve_rng_state():
                managed = start(
                    model,
                    self.config,
                    planner and self._telling(planner, plan, single_ms),
                    announce=False,
                    survives=True,
                )
            if managed is not None and managed.overlap is not None and self.config.verify:
                from gemini.launcher.verification import Verification

                managed.overlap.verify = Verification(managed.name, self.config).check
            return managed is not None
        except Exception as error:
            if self.config.strict:
                raise
            return self.stays(model, _reason(error), "in this process")
        finally:
            self.recognition.resume()

    def planner(self) -> Planner | None:
        """What makes plans of whole steps; None where they are not wanted."""
        from gemini.compiler import planner_for

        return planner_for(self.config)

    def _telling(self, planner: Planner, plan: StepPlan | None, single_ms: float | None) -> Planner:
        """Return the planner, which shows its first plan; `plan` is one that it would make."""
        first = [plan]
        shown: list[StepPlan] = []

        def plan_and_tell(model: nn.Module, args: Any, kwargs: Any, **changes: Any) -> StepPlan:
            made = first.pop() if first else None
            found = made or planner(model, args, kwargs, **changes)
            if not shown:
                shown.append(found)
                self.show(model, found, single_ms)
            return found

        return plan_and_tell

    def show(self, model: nn.Module, plan: StepPlan, single_ms: float | None = None) -> None:
        """Print the summary of a plan."""
        if not self.config.quiet:
            from gemini.launcher.run_summary import show

            show(model, plan, self.recognition.trained_by(model), self.config, single_ms)

    def stays(self, model: nn.Module, reason: str, how: str = "as under python") -> bool:
        """A model has no workers: one line says why, and so does `gemini explain` afterwards."""
        from gemini.runtime.run_journal import journal_of

        name, reason = type(model).__name__, reason.partition("\n")[0]
        self.say(f"{name} runs {how}: {reason}")
        journal_of(Path(self.config.run_folder).resolve(), self.config.quiet).stays(name, reason)
        return False

    def say(self, text: str) -> None:
        """One line to the user."""
        if not self.config.quiet:
            tell(f"gemini: {text}".partition("\n")[0])


def _obstacle(model: nn.Module) -> str:
    """Return why a model cannot have workers; '' where it can."""
    import torch

    if isinstance(model, torch.jit.ScriptModule):
        return "torch.jit has compiled it"
    group = torch.distributed
    if group.is_available() and group.is_initialized() and group.get_world_size() > 1:
        return "the program spreads its own training over several processes"
    return ""


def load_config(session: Session, folder: str) -> GeminiConfig:
    """Return the configuration of a session; its run folder is relative to `folder`."""
    config = GeminiConfig.load(session["config"], flags=session["flags"])
    return GeminiConfig(**config.to_dict() | {"run_folder": str(Path(folder, config.run_folder))})


def decider_for(session: Session, folder: str) -> Forced:
    """What a session asks for."""
    config = load_config(session, folder)
    is_asked = config.asks_for_workers
    config = completed(config)
    if config.dry_run:
        from gemini.launcher.dry_run import DryRun

        return DryRun(config)
    if is_asked:
        return Forced(config)
    from gemini.launcher.auto import Auto

    return Auto(config)


def _reason(error: Exception) -> str:
    """What is wrong, in words that begin with it."""
    if isinstance(error, ConfigError) and error.faults:
        return error.faults[0].what
    return f"{type(error).__name__}: {error}"
