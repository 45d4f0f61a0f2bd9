"""Piped model: a model cut into stages that run in this process.

It holds graph, profile, partition and generated source, and runs the stages in place of the model. Stages use the
parameters and layers of the model itself: training one trains the other, and state has its original names.
"""

from __future__ import annotations

import copy
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

    @property
    def where(self) -> str:
        """The folder of the stages, or the name of the model in place of one."""
        return f"<stages of {type(self.model).__name__}>" if self.folder is None else str(self.folder)

    def _make_stages(self) -> None:
        self.stages = make_stages(self.codes, self.model, self.where)
        self.stage_tensors = StageTensors(self.stages, self.model)
        self.mutable_state = MutableState(self.graph, self.model)

    def with_graph(self, graph: Graph) -> Piped:
        """Return the same stages for a graph that differs from this one in sizes alone."""
        other = self.with_call_guard(graph)
        other.graph = graph
        return other

    def with_call_guard(self, graph: Graph) -> Piped:
        """Return the same stages for the calls of a graph that differs from the guarded one in sizes alone."""
        other = copy.copy(self)
        other.call_guard = self.call_guard.with_graph(graph)
        return other

    # ── artifacts ────────────────────────────────────────────────────────────────────────────────────────────
    @property
    def interfaces(self) -> tuple[Interface, ...]:
        """The inputs and outputs of each stage."""
        return tuple(code.interface for code in self.codes)

    @property
    def sources(self) -> dict[str, str]:
        """The generated source by file name."""
        return {stage_file(code.interface.stage): code.source for code in self.codes}

    @cached_property
    def analysis(self) -> Analysis:
        """Time, memory and traffic of every stage, balance and expected speed-up."""
        from gemini.partition.analysis.analysis_builder import analyse

        return analyse(self.graph, self.profile, self.partition)

    @property
    def fallbacks(self) -> int:
        """The number of calls that fell back to the original model."""
        return self._fallbacks.reasons.total()

    @property
    def fallback_reasons(self) -> dict[str, int]:
        """The number of fallbacks per reason."""
        return dict(self._fallbacks.reasons)

    # ── running ────────────────────────────────────────────────────────────────────────────────────────────────
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stages in sequence, in one autograd graph; fall back to the model if the call does not match."""
        return run_with_hooks(self.model, args, kwargs, self.run_stages)

    def run_stages(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the stages in sequence without the hooks of the model; fall back to `forward`."""

        def run(bound: dict[str, Any]) -> Any:
            return self.routes.run(self.stages, self.model, bound)

        return self._attempt(forward, args, kwargs, run)

    def run_detached(
        self,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        loss: Callable[[Any], torch.Tensor | None] | None = None,
    ) -> DetachedResult:
        """Run one step, forward and backward, with copies instead of autograd between the stages.

        `loss` computes a scalar from the model's output, None skips the backward; the default is the loss in the
        output. Gradients are added to the parameters as `backward()` does. A call that does not match falls
        back to the model.
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
        mismatch = self.call_guard.find_mismatch(bound)
        if mismatch is None:
            self._refresh_stages()
            before = Rollback(self.mutable_state, bound)
            try:
                output = run(bound)
                before.discard()
                return output
            except Exception as error:
                # The model raises the same error itself, or runs where the stages are not valid.
                mismatch = mismatch_of_error(error)
            before.undo()
        return self._fall_back(forward, args, kwargs, mismatch)

    def _fall_back(self, forward: Callable[..., Any], args: Any, kwargs: Any, mismatch: Mismatch) -> Any:
        output = forward(*args, **kwargs)
        self._fallbacks.count(mismatch)
        return output

    def _refresh_stages(self) -> None:
        """Rebuild the stages where the model has replaced tensors that they hold themselves."""
        if not self.stage_tensors.are_current():
            self._make_stages()

    def check(self, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None) -> CheckReport:
        """Compare the sequential run and the detached step with the model; all state is restored."""
        from gemini.pipe.stage_check import check_piped

        return check_piped(self, args, dict(kwargs or {}))

    # ── state ──────────────────────────────────────────────────────────────────────────────────────────────────
    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters of the model, in its order."""
        yield from self.model.parameters()

    def named_parameters(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters of all stages under their original names."""
        yield from self.model.named_parameters(remove_duplicate=remove_duplicate)

    def named_buffers(self, *, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the buffers of all stages under their original names."""
        yield from self.model.named_buffers(remove_duplicate=remove_duplicate)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the model, which is that of all stages together."""
        return dict(self.model.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load a state of the model, from any partition."""
        result = self.model.load_state_dict(state, strict=strict, assign=assign)
        self._refresh_stages()
        return result

    def train(self, mode: bool = True) -> Piped:
        """Set the training mode of model and stages."""
        self.model.train(mode)
        follow_modes(self.stages, self.model)
        return self

    def eval(self) -> Piped:
        """Set model and stages to evaluation mode."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters."""
        self.model.zero_grad(set_to_none)

    # ── files ──────────────────────────────────────────────────────────────────────────────────────────────────
    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write stages, manifest, partition, graph and profile; all or nothing.

        A folder of an earlier save is replaced; if files in it were edited since, only with `overwrite`.
        """
        from gemini.pipe.stage_writer import save_piped

        return save_piped(self, folder, overwrite=overwrite)

    @staticmethod
    def load(folder: str | Path, model: nn.Module, *, regenerate: bool = False) -> Piped:
        """Read a saved folder for its model.

        Only unchanged files are executed. With `regenerate` the stages are generated again from graph and partition,
        and the folder is written again.
        """
        from gemini.pipe.stage_loader import load_piped

        return load_piped(folder, model, regenerate=regenerate)

    def __repr__(self) -> str:
        many = f"{len(self.stages)} stages on {self.partition.nparts} workers"
        return f"Piped({type(self.model).__name__}, {many}, by {self.partition.partitioner})"


def build_piped(
    graph: Graph,
    profile: Profile,
    partition: Partition,
    shares: Mapping[int, int] | None = None,
    replace_sources: Callable[[Sequence[StageCode]], tuple[Sequence[StageCode], Path | None]] | None = None,
) -> Piped:
    """Generate the stages of a partition and make them live.

    `shares` maps nodes whose values are multiplied by a micro-batch weight to the index of that weight.
    `replace_sources` returns the stages with the texts to execute, and the folder of these.
    """
    from gemini.codegen import generate_stages

    codes: Sequence[StageCode] = generate_stages(graph, partition, **({"shares": shares} if shares else {}))
    codes, folder = (codes, None) if replace_sources is None else replace_sources(codes)
    return Piped(graph.bound_model(), graph, profile, partition, codes, folder=folder)


def find_loss(output: Any) -> torch.Tensor:
    """Return the loss in an output: the output, its `loss`, or the first of a tuple, whichever is a scalar."""
    first = output[0] if isinstance(output, (tuple, list)) and output else None
    named = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    for value in (output, named, first):
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.requires_grad:
            return value
    raise GenerateError(
        f"the output, a {type(output).__name__}, has no loss to differentiate\n    → run_detached(args, kwargs, loss=…)"
    )
