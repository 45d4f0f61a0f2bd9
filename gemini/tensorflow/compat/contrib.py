"""tf.contrib: the parts of it that the layer has, as tables of names; each is a module, so that scripts import it."""

from __future__ import annotations

import sys

from gemini.tensorflow.compat.lazy_names import LEGACY, NameTable

_PACKAGE = "gemini.tensorflow.compat"
_V1 = "tensorflow.compat.v1:"
_TABLES = {
    f"{_PACKAGE}.contrib_functions:": """
        cluster_resolver TPUClusterResolver
        framework add_arg_scope arg_scope
        metrics accuracy
        opt AdamWOptimizer MomentumWOptimizer extend_with_decoupled_weight_decay
        seq2seq sequence_loss
    """,
    f"{_PACKAGE}.contrib_layers:": """
        layers apply_regularization avg_pool2d batch_norm conv2d convolution2d dropout embed_sequence flatten
        layers fully_connected l1_l2_regularizer l1_regularizer l2_regularizer layer_norm linear max_pool2d
        layers one_hot_encoding optimize_loss relu sum_regularizer variance_scaling_initializer xavier_initializer
        layers xavier_initializer_conv2d
    """,
    f"{_PACKAGE}.run_config:": "tpu InputPipelineConfig TPUConfig RunConfig=TPURunConfig",
    f"{_PACKAGE}.estimator_spec:": "tpu TPUEstimatorSpec",
    f"{_PACKAGE}.tpu_estimator:": "tpu TPUEstimator",
    f"{_PACKAGE}.hyper_parameters:": "training HParams",
    f"{LEGACY}.__internal__.legacy.rnn_cell:": """
        rnn BasicLSTMCell BasicRNNCell DeviceWrapper DropoutWrapper GRUCell LSTMCell LSTMStateTuple MultiRNNCell
        rnn RNNCell ResidualWrapper
    """,
    f"{_V1}": "framework get_variables=global_variables get_trainable_variables=trainable_variables nest sort argsort",
    f"{_V1}data.experimental.": """
        data bucket_by_sequence_length choose_from_datasets group_by_window ignore_errors prefetch_to_device
        data make_batched_features_dataset make_csv_dataset map_and_batch parallel_interleave sample_from_datasets
        data shuffle_and_repeat unbatch unique
    """,
    f"{_V1}metrics.": """
        metrics streaming_accuracy=accuracy streaming_auc=auc streaming_mean=mean streaming_mean_iou=mean_iou
        metrics streaming_mean_absolute_error=mean_absolute_error streaming_mean_squared_error=mean_squared_error
        metrics streaming_precision=precision streaming_recall=recall
        metrics streaming_root_mean_squared_error=root_mean_squared_error
    """,
    f"{_V1}nn.": "rnn static_bidirectional_rnn static_rnn static_state_saving_rnn",
    f"{_V1}tpu.": "tpu CrossShardOptimizer bfloat16_scope",
    f"{_V1}train.": """
        framework get_global_step get_or_create_global_step init_from_checkpoint list_variables load_checkpoint
        framework load_variable
    """,
}
"""By module or prefix: lines of a part and its names, as `name` or `name=name today`."""


def _read_tables() -> dict[str, dict[str, str]]:
    parts: dict[str, dict[str, str]] = {}
    for origin, table in _TABLES.items():
        for line in table.strip().splitlines():
            part, *names = line.split()
            for name, _, today in (one.partition("=") for one in names):
                parts.setdefault(part, {})[name] = origin + (today or name)
    return parts


PARTS = {part: NameTable(f"tf.contrib.{part}", names) for part, names in sorted(_read_tables().items())}
globals().update(PARTS, keras=NameTable("tf.contrib.keras", {}, (LEGACY,)))
sys.modules.update({f"{__name__}.{part}": table for part, table in PARTS.items()})


def __getattr__(name: str) -> object:
    return getattr(NameTable("tf.contrib", dict.fromkeys(PARTS, "")), name)
