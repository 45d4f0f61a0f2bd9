"""Keras trainer: `fit` of Keras 3 in steps whose batch has a known size.

Keras traces one function for batches of every size. A twin splits a batch into micro-batches of a known size, so while
the engine is installed `fit` traces its step once per size: for whole batches, and for the last one of an epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

TRAINER = "keras.src.backend.tensorflow.trainer"
_original: list[Callable[..., Any]] = []


def patch_trainer() -> None:
    """Let `fit` trace a step per batch size, where Keras 3 on TensorFlow is loaded; again once it is."""
    trainer = _trainer()
    if trainer is None or _original:
        return
    make_function = trainer._make_function
    _original.append(make_function)

    def _make_function(self: Any, step_function: Callable[..., Any]) -> Any:
        is_training = getattr(step_function, "__func__", None) is type(self).train_step
        if self.run_eagerly or not is_training or self.distribute_strategy.num_replicas_in_sync > 1:
            return make_function(self, step_function)
        return _steps_by_size(self, step_function)

    trainer._make_function = _make_function


def restore_trainer() -> None:
    """Undo `patch_trainer`."""
    trainer = _trainer()
    if _original and trainer is not None:
        trainer._make_function = _original.pop()


def _trainer() -> Any:
    """Return the class whose `_make_function` makes the steps of `fit`; None where it is not loaded."""
    trainer = getattr(sys.modules.get(TRAINER), "TensorFlowTrainer", None)
    return trainer if hasattr(trainer, "_make_function") else None


def _steps_by_size(model: Any, step_function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that Keras calls with an iterator for `steps_per_execution` steps."""
    import tensorflow as tf

    from gemini.tensorflow.function_twin import redirect

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def one_step(data: Any) -> Any:
        results = step_function(data)
        redirect(tf.compat.v1.get_default_graph(), tf.nest.flatten(results))
        return results

    traced = tf.function(one_step, jit_compile=False)

    def function(iterator: Any) -> Any:
        outputs = None
        for _, data in zip(range(model.steps_per_execution), iterator):
            outputs = traced(_without_optionals(data))
        if outputs is None:
            raise StopIteration
        return outputs

    return function


def _without_optionals(data: Any) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(lambda one: None if isinstance(one, tf.experimental.Optional) else one, data)
