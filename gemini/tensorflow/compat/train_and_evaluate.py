"""train_and_evaluate: training with an evaluation after checkpoints, in one process."""

from __future__ import annotations

import time
from typing import Any

from gemini.tensorflow.compat.estimator import Estimator
from gemini.tensorflow.compat.estimator_spec import EvalSpec, TrainSpec
from gemini.tensorflow.compat.lazy_names import tf


def train_and_evaluate(
    estimator: Estimator, train_spec: TrainSpec, eval_spec: EvalSpec
) -> tuple[dict[str, Any] | None, list[Any]]:
    """Train and evaluate; return the last metrics, and the exports: none."""
    if not isinstance(train_spec, TrainSpec) or not isinstance(eval_spec, EvalSpec):
        raise TypeError("`train_spec` must have type `tf.estimator.TrainSpec`, `eval_spec` `tf.estimator.EvalSpec`.")
    evaluations = _Evaluations(estimator, eval_spec)
    estimator.train(
        train_spec.input_fn,
        hooks=list(train_spec.hooks),
        max_steps=train_spec.max_steps,
        saving_listeners=[*train_spec.saving_listeners, evaluations],
    )
    return evaluations.last, []


class _Evaluations:
    """A listener of checkpoints that evaluates each, at most every `throttle_secs`, and always the last one."""

    def __init__(self, estimator: Estimator, spec: EvalSpec) -> None:
        self.last: dict[str, Any] | None = None
        self._estimator, self._spec = estimator, spec
        self._evaluated_at, self._evaluated_step = 0.0, -1
        self._is_first = True

    def begin(self) -> None:
        """Start."""

    def before_save(self, session: Any, global_step: int) -> None:
        """Before a checkpoint."""

    def after_save(self, session: Any, global_step: int) -> None:
        """Evaluate the checkpoint, unless it is that of the start or follows too soon."""
        del session
        if self._is_first:  # the checkpoint of the start
            self._is_first = False
            self._evaluated_at = time.monotonic()
        elif time.monotonic() - self._evaluated_at >= self._spec.throttle_secs:
            self._evaluate(global_step)

    def end(self, session: Any, global_step: int) -> None:
        """Evaluate the last checkpoint."""
        del session
        if global_step != self._evaluated_step:
            self._evaluate(global_step)

    def _evaluate(self, global_step: int) -> None:
        tf.logging.info("Evaluating the checkpoint of step %d.", global_step)
        spec = self._spec
        self.last = self._estimator.evaluate(spec.input_fn, spec.steps, spec.hooks, name=spec.name)
        self._evaluated_at, self._evaluated_step = time.monotonic(), int(global_step)
