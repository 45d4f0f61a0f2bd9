"""Keras trainer: `fit` of Keras 3 in steps whose batch has a known size.

Keras traces one function for batches of every size. A twin splits a batch into micro-batches of a known size, so while
the engine is installed `fit` traces its step once per size: for whole batches, and for the last one of an epoch.
Two things of Keras depend on its own trace and are kept, so that the numbers are those of `python`:

    losses of outputs    are averaged over samples where Keras knows the size of a batch, else over batches
    the end of the data  where Keras does not know the number of batches, it starts one step more, which finds no data;
                         all that needs no data is updated: the optimizer's iterations, seeds, counts of metrics
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

TRAINER = "keras.src.backend.tensorflow.trainer"
END_DELAY = 0.05
"""Seconds for the updates of a step without data, before the data set says that it has ended."""
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
        return _steps_by_size(self, step_function, make_function(self, step_function))

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


def _steps_by_size(model: Any, step_function: Callable[..., Any], whole: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that Keras calls with an iterator for `steps_per_execution` steps; `whole` is Keras's own."""
    import tensorflow as tf

    sizes = KnownSizes()
    traced = {known: _traced(model, step_function, known) for known in (True, False)}

    def function(iterator: Any) -> Any:
        outputs = None
        is_dataset = isinstance(iterator, tf.data.Iterator)
        for _, data in zip(range(model.steps_per_execution), iterator):
            given = _without_optionals(data)
            outputs = traced[sizes.knows(iterator.element_spec if is_dataset else None, given)](given)
        if outputs is None and is_dataset and model.steps_per_execution == 1:
            _end(whole, iterator)
        if outputs is None:
            raise StopIteration
        return outputs

    return function


def _traced(model: Any, step_function: Callable[..., Any], known: bool) -> Any:
    """Return a step that is traced per size; `known` says whether Keras would know the size of a batch."""
    import tensorflow as tf

    from gemini.tensorflow.function_twin import redirect

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def one_step(data: Any) -> Any:
        with ExitStack() as stack:
            if not known:
                stack.enter_context(_averages_over_batches(model))
            results = step_function(data)
        redirect(tf.compat.v1.get_default_graph(), tf.nest.flatten(results))
        return results

    return tf.function(one_step, jit_compile=False)


class KnownSizes:
    """Which batches have a size that Keras's own trace would know.

    The shapes of a data set say it. Batches given one at a time are traced with their shapes the first time, and, where
    the shapes change, with those that are common to all.
    """

    def __init__(self) -> None:
        self._first: list[Any] = []
        self._common: list[Any] = []

    def knows(self, specification: Any, data: Any) -> bool:
        """Return whether the first entries of the features have a known size."""
        if specification is not None:
            return None not in _sizes(specification)
        sizes = _sizes(data)
        self._first = self._first or sizes
        self._common = [old if old == new else None for old, new in zip(self._common or sizes, sizes)]
        return sizes == self._first or None not in self._common


def _sizes(data: Any) -> list[Any]:
    """Return the first dimension of each feature of a batch, or of its specification."""
    import tensorflow as tf

    features = data[0] if isinstance(data, (tuple, list)) else data
    shapes = [getattr(one, "shape", None) for one in tf.nest.flatten(features)]
    return [shape[0] for shape in shapes if shape is not None and len(shape)]


@contextmanager
def _averages_over_batches(model: Any) -> Iterator[None]:
    """Let the losses of outputs count each batch once, as Keras does where a batch has no known size."""
    metrics = list(getattr(getattr(model, "_compile_loss", None), "metrics", ()))
    for metric in metrics:
        metric.update_state = lambda value, update=metric.update_state, **_: update(value)
    try:
        yield
    finally:
        for metric in metrics:
            del metric.update_state


def _end(whole: Callable[..., Any], iterator: Any) -> None:
    """Start Keras's own step on a data set that has ended."""
    import tensorflow as tf

    from gemini.tensorflow.tapes import own_gradients

    def ended() -> Iterator[Any]:
        time.sleep(END_DELAY)
        yield from ()

    empty = iterator
    if not any(isinstance(one, tf.OptionalSpec) for one in tf.nest.flatten(iterator.element_spec)):
        empty = iter(tf.data.Dataset.from_generator(ended, output_signature=iterator.element_spec))
    with own_gradients():
        whole(empty)


def _without_optionals(data: Any) -> Any:
    import tensorflow as tf

    return tf.nest.map_structure(lambda one: None if isinstance(one, tf.experimental.Optional) else one, data)
