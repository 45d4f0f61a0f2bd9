"""tf.estimator.inputs: input functions over arrays in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gemini.tensorflow.compat.lazy_names import tf

_InputFn = Callable[[], Any]


def numpy_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
) -> _InputFn:
    """Return an input function that yields batches of arrays; `num_threads` reads ahead of the training."""
    if not isinstance(shuffle, bool):
        raise ValueError("shuffle must be provided and explicitly set as boolean")

    def input_fn() -> Any:
        data = tf.data.Dataset.from_tensor_slices((x, y) if y is not None else (x,))
        if shuffle:
            data = data.shuffle(queue_capacity)
        data = data.repeat(num_epochs).batch(batch_size).prefetch(num_threads)
        values = tf.data.make_one_shot_iterator(data).get_next()
        return values if y is not None else values[0]

    return input_fn


def pandas_input_fn(
    x: Any,
    y: Any = None,
    batch_size: int = 128,
    num_epochs: int | None = 1,
    shuffle: bool | None = None,
    queue_capacity: int = 1000,
    num_threads: int = 1,
    target_column: str = "target",
) -> _InputFn:
    """Return an input function that yields batches of a data frame's columns."""
    labels = None
    if y is not None:
        is_frame = hasattr(y, "columns")
        labels = {name: y[name].to_numpy() for name in y.columns} if is_frame else y.to_numpy()
        if target_column in x:
            raise ValueError(f"Cannot use name {target_column} for target column: DataFrame already has a column")
    columns = {name: x[name].to_numpy() for name in x.columns}
    return numpy_input_fn(columns, labels, batch_size, num_epochs, shuffle, queue_capacity, num_threads)
