"""Piped: a model in stages, live in this process.

It holds everything the flow made on the way (graph, profile, partition, generated text), and runs the stages in the
model's place. The model keeps its identity: stages use its own parameters and layers, nothing is copied, so training
the one trains the other, and state goes in and out under the original names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from gemini.capture.module_hooks import run_with_hooks
from gemini.errors import GenerateError
from gemini.ir.call_binding import bind
from gemini.pipe.detached_step import DetachedResult, DetachedStep
from gemini.pipe.live_stages import StageTensors, follow_modes, make_stages, stage_file
from gemini.pipe.rollback import MutableState, Rollback
from gemini.pipe.stage_guards import CallGuard, Fallbacks, Mismatch, mismatch_of_error
from gemini.pipe.value_routes import ValueRoutes

if TYPE_CHECKING:
    from gemini.codegen.stage_generator import StageCode
    from gemini.codegen.stage_interface import Interface
    from gemini.ir.graph import Graph
    from gemini.partition.analysis.analysis_builder import Analysis
    from gemini.partition.assignment import Partition
    from gemini.pipe.stage_check import CheckReport
    from gemini.profiling.profile_result import Profile

Run = Callable[[dict[str, Any]], Any]


class Piped:
    """A model cut into stages. Call it as the model; `stages` are its parts."""

    def __init__(
        self,
        model: nn.Module,
        graph: Graph,
        profile: Profile,
        partition: Partition,
        codes: Sequence[StageCode],
        *,
        folder: Path | None = None,
    ) -> None:
        self.model, self.graph, self.profile, self.partition = model, graph, profile, partition
        self.codes = tuple(codes)
        self.folder = folder
        self.routes = ValueRoutes(graph, self.interfaces)
        self._make_stages()
        self.call_guard = CallGuard(graph)
        self._fallbacks = Fallbacks(type(model).__name__)

    def _make_stages(self) -> None:
        where = f"<stages of {type(self.model).__name__}>" if self.folder is None else str(self.folder)
        self.stages = make_stages(self.codes, self.model, where)
        self.stage_tensors = StageTensors(self.stages, self.model)
        self.mutable_state = MutableState(self.graph, self.model)

    # ── what the flow made ─────────────────────────────────────────────────────────────────────────────────────
    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """What enters and leaves each stage."""
        return tuple(code.interface for code in self.codes)

    @property
    def sources(self) -> dict[str, str]:
        """The generated text by file name."""
        return {stage_file(code.interface.stage): code.source for code in self.codes}

    @cached_property
    def analysis(self) -> Analysis:
        """Time, memory and traffic of every stage, balance and expected speed-up."""
        from gemini.partition.analysis.analysis_builder import analyse

        return analyse(self.graph, self.profile, self.partition)

    @property
    def fallbacks(self) -> int:
        """How many calls ran the model itself because they did not fit."""
        return self._fallbacks.reasons.total()

    @property
    def fallback_reasons(self) -> dict[str, int]:
        """Why, and how often."""
        return dict(self._fallbacks.reasons)

    # ── running ────────────────────────────────────────────────────────────────────────────────────────────────
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages one after another, in one autograd graph; the model itself if the call does not fit."""

        def run(bound: dict[str, Any]) -> Any:
            return self.routes.run(self.stages, self.model, bound)

        return run_with_hooks(self.model, args, kwargs, lambda forward, a, k: self._attempt(forward, a, k, run))

    def run_detached(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss: Callable[[Any], torch.Tensor | None] | None = None,
    ) -> DetachedResult:
        """One step, forward and backward, with copies instead of autograd between the stages.

        `loss` makes a scalar of the model's output, or None for no backward; by default the output's own loss is
        taken. Gradients are added to the parameters as `backward()` does. A call that does not fit takes the step
        with the model itself.
        """
        steps: list[DetachedStep] = []

        def run(bound: dict[str, Any]) -> Any:
            step = DetachedStep(self.routes, self.stages, self.model, bound)
            output = step.forward()
            steps.append(step)
            return output

        output = run_with_hooks(
            self.model, args, dict(kwargs or {}), lambda forward, a, k: self._attempt(forward, a, k, run)
        )
        value = find_loss(output) if loss is None else loss(output)
        if value is None:
            return DetachedResult(output, None)
        if steps:
            steps[0].backward(value)
        else:
            value.backward()
        return DetachedResult(output, value.detach())

    def _attempt(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], run: Run) -> Any:
        bound = bind(self.model, args, kwargs)
        misfit = self.call_guard.find_mismatch(bound)
        if misfit is None:
            self._keep_current()
            before = Rollback(self.mutable_state, bound)
            try:
                output = run(bound)
                before.forget()
                return output
            except Exception as error:
                # What fails here fails in the model too, which then raises its own error; or it is right and runs.
                misfit = mismatch_of_error(error)
            before.undo()
        return self._fall_back(forward, args, kwargs, misfit)

    def _fall_back(self, forward: Callable[..., Any], args: Any, kwargs: Any, misfit: Mismatch) -> Any:
        output = forward(*args, **kwargs)
        self._fallbacks.count(misfit)
        return output

    def _keep_current(self) -> None:
        """Stages hold some tensors themselves: pick them again where the model has got others."""
        if not self.stage_tensors.are_current():
            self._make_stages()

    def check(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> CheckReport:
        """Compare the sequential run and the detached step with the model itself; leaves everything as it was."""
        from gemini.pipe.stage_check import check_piped

        return check_piped(self, args, dict(kwargs or {}))

    # ── state ──────────────────────────────────────────────────────────────────────────────────────────────────
    def parameters(self) -> Iterator[nn.Parameter]:
        """The model's parameters, in its order."""
        yield from self.model.parameters()

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Its parameters under their original names: those of all stages together."""
        yield from self.model.named_parameters(remove_duplicate=remove_duplicate)

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Its buffers under their original names: those of all stages together."""
        yield from self.model.named_buffers(remove_duplicate=remove_duplicate)

    def state_dict(self) -> dict[str, Any]:
        """The state of all stages together, which is the model's, as the model saves it."""
        return dict(self.model.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the model, of this partition or of another."""
        told = self.model.load_state_dict(state, strict=strict, assign=assign)
        self._keep_current()
        return told

    def train(self, mode: bool = True) -> Piped:
        """Put model and stages in training mode, or out of it."""
        self.model.train(mode)
        follow_modes(self.stages, self.model)
        return self

    def eval(self) -> Piped:
        """Put model and stages in evaluation mode."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.model.zero_grad(set_to_none)

    # ── files ──────────────────────────────────────────────────────────────────────────────────────────────────
    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write stages, manifest, partition, graph and profile; all or nothing.

        A folder of an earlier save is replaced. Where files in it were edited since, only with `overwrite`.
        """
        from gemini.pipe.stage_writer import save_piped

        return save_piped(self, folder, overwrite=overwrite)

    @staticmethod
    def load(folder: str | Path, model: nn.Module, *, regenerate: bool = False) -> Piped:
        """Read what `save` wrote, for the model it was made of.

        Only unchanged files are executed. With `regenerate` the stages are generated anew from graph and partition,
        and the folder is written again.
        """
        from gemini.pipe.stage_loader import load_piped

        return load_piped(folder, model, regenerate=regenerate)

    def __repr__(self) -> str:
        many = f"{len(self.stages)} stages on {self.partition.nparts} workers"
        return f"Piped({type(self.model).__name__}, {many}, by {self.partition.partitioner})"


def build_piped(graph: Graph, profile: Profile, partition: Partition, shares: Mapping[int, int] | None = None) -> Piped:
    """Generate the stages of a partition and make them live.

    `shares` are nodes whose values are multiplied by the weight of the micro-batch, each with its number among them.
    """
    from gemini.codegen import generate_stages

    codes = generate_stages(graph, partition, **({"shares": shares} if shares else {}))
    return Piped(graph.bound_model(), graph, profile, partition, codes)


def find_loss(output: Any) -> torch.Tensor:
    """The loss in a model's output: the output itself, its `loss`, or the first of a tuple, if that is one number."""
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    for value in (output, named, first):
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad:
            return value
    raise GenerateError(
        f"the output, a {type(output).__name__}, has no loss to differentiate\n    → run_detached(args, kwargs, loss=…)"
    )
