"""tf.contrib.data: transformations of data sets, which are `tf.data.experimental` today."""

from __future__ import annotations

from gemini.tensorflow.compat.lazy_names import lazy_names

_SAME = (
    "bucket_by_sequence_length", "choose_from_datasets", "group_by_window", "ignore_errors",
    "make_batched_features_dataset", "make_csv_dataset", "map_and_batch", "parallel_interleave", "prefetch_to_device",
    "sample_from_datasets", "shuffle_and_repeat", "unbatch", "unique",
)  # fmt: skip

__getattr__ = lazy_names("tf.contrib.data", {name: f"tensorflow.compat.v1:data.experimental.{name}" for name in _SAME})
