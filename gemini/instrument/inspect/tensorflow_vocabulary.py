"""The vocabulary of TensorFlow: graph code with sessions (1-style), Keras, tapes and estimators.

`tf.compat.v1`, `tf_keras` and stand-alone Keras are mapped to TensorFlow's names before matching.
"""

from __future__ import annotations

from gemini.instrument.inspect.vocabulary import Vocabulary

_OPS = (
    "abs", "add", "add_n", "argmax", "argmin", "batch_matmul", "boolean_mask", "cast", "clip_by_value",
    "concat", "cumsum", "einsum", "exp", "expand_dims", "fill", "gather", "gather_nd", "log", "matmul",
    "maximum", "minimum", "multiply", "one_hot", "pad", "pow", "range", "reduce_max", "reduce_mean",
    "reduce_min", "reduce_sum", "reshape", "rsqrt", "scan", "sigmoid", "slice", "split", "sqrt", "square",
    "squeeze", "stack", "subtract", "tanh", "tensordot", "tile", "transpose", "unstack", "where",
)  # fmt: skip

_NN_LOSSES = (
    "ctc_loss", "l2_loss", "nce_loss", "sampled_softmax_loss", "sigmoid_cross_entropy_with_logits",
    "softmax_cross_entropy_with_logits", "softmax_cross_entropy_with_logits_v2",
    "sparse_softmax_cross_entropy_with_logits", "weighted_cross_entropy_with_logits",
)  # fmt: skip

_CALLS = (
    *((f"tensorflow.nn.{name}", "loss") for name in _NN_LOSSES),
    ("tensorflow.losses.get_*", ""),
    ("tensorflow.losses.[a-z]*", "loss"),
    ("tensorflow.keras.losses.*", "loss"),
    ("tensorflow.nn.rnn_cell.*", "layer"),
    ("tensorflow.nn.*", "op"),
    ("tensorflow.contrib.layers.*", "layer"),
    ("tensorflow.contrib.slim.*", "layer"),
    ("tensorflow.contrib.rnn.*", "layer"),
    ("tensorflow.layers.[a-z]*", "layer"),
    ("tensorflow.keras.layers.*", "layer"),
    ("tensorflow.keras.Input", "layer"),
    ("tensorflow.get_variable", "layer"),
    ("tensorflow.Variable", "layer"),
    *((f"tensorflow.{name}", "op") for name in _OPS),
    ("tensorflow.math.*", "op"),
    ("tensorflow.linalg.*", "op"),
    ("tensorflow.keras.Model", "model"),
    ("tensorflow.keras.Sequential", "model"),
    ("tensorflow.keras.models.Model", "model"),
    ("tensorflow.keras.models.Sequential", "model"),
    ("tensorflow.keras.models.load_model", "checkpoint"),
    ("tensorflow.keras.applications.*", "model"),
    ("tensorflow.keras.applications.*.[A-Z]*", "model"),
    ("tensorflow.estimator.*Estimator*", "trainer"),
    ("tensorflow.estimator.train_and_evaluate", "train loop"),
    ("tensorflow.estimator.inputs.*", "data"),
    ("tensorflow.keras.optimizers.schedules.*", "scheduler"),
    ("tensorflow.train.*_decay*", "scheduler"),
    ("tensorflow.keras.optimizers.*", "optimizer"),
    ("tensorflow.keras.optimizers.*.*", "optimizer"),
    ("tensorflow.train.*Optimizer", "optimizer"),
    ("tensorflow.optimizers.*", "optimizer"),
    ("tensorflow.keras.datasets.*.load_data", "data"),
    ("tensorflow.keras.utils.*_dataset_from_directory", "data"),
    ("tensorflow.keras.preprocessing.*.ImageDataGenerator", "data"),
    ("tensorflow.data.*", "data"),
    ("tensorflow.data.Dataset.*", "data"),
    ("tensorflow.placeholder", "data"),
    ("tensorflow.placeholder_with_default", "data"),
    ("tensorflow_datasets.load", "data"),
    ("tensorflow.device", "device"),
    ("tensorflow.distribute.*Strategy", "device"),
    ("tensorflow.config.set_visible_devices", "device"),
    ("tensorflow.config.set_logical_device_configuration", "device"),
    ("tensorflow.Session", "session"),
    ("tensorflow.InteractiveSession", "session"),
    ("tensorflow.train.*Session", "session"),
    ("tensorflow.train.Server", "session"),
    ("tensorflow.train.Saver", "checkpoint"),
    ("tensorflow.train.Checkpoint*", "checkpoint"),
    ("tensorflow.train.latest_checkpoint", "checkpoint"),
    ("tensorflow.saved_model.*", "checkpoint"),
    ("tensorflow.keras.callbacks.ModelCheckpoint", "checkpoint"),
    ("tensorflow.gradients", "backward"),
    ("tensorflow_hub.KerasLayer", "layer"),
    ("tensorflow_hub.load", "model"),
)

_BASES = (
    ("tensorflow.keras.Model", "model"),
    ("tensorflow.keras.Sequential", "model"),
    ("tensorflow.keras.models.*", "model"),
    ("tensorflow.keras.layers.*", "model"),
    ("tensorflow.layers.[A-Z]*", "model"),
    ("tensorflow.nn.rnn_cell.*", "model"),
    ("tensorflow.Module", "model"),
    ("tensorflow.keras.losses.*", "loss"),
    ("tensorflow.keras.optimizers.schedules.*", "scheduler"),
    ("tensorflow.keras.optimizers.*", "optimizer"),
    ("tensorflow.keras.optimizers.*.*", "optimizer"),
    ("tensorflow.train.*Optimizer", "optimizer"),
    ("tensorflow.keras.utils.Sequence", "data"),
)

_METHODS = {
    "gradient": ("backward", "tape"),
    "compute_gradients": ("backward", "optimizer"),
    "apply_gradients": ("step", "any"),
    "minimize": ("step", "any"),
    "fit": ("train loop", "model"),
    "fit_generator": ("train loop", "model"),
    "train_on_batch": ("step", "model"),
    "evaluate": ("eval loop", "model"),
    "predict": ("eval loop", "model"),
    "compile": ("optimizer", "model"),
    "save_weights": ("checkpoint", "any"),
    "load_weights": ("checkpoint", "any"),
    "save": ("checkpoint", "model or checkpoint"),
    "restore": ("checkpoint", "checkpoint"),
    "train": ("train loop", "trainer"),
}

TENSORFLOW = Vocabulary(
    framework="TensorFlow",
    roots=frozenset({"keras", "tensorflow", "tensorflow_datasets", "tensorflow_hub", "tf_keras"}),
    aliases=(
        ("tensorflow.compat.v1.keras.", "tensorflow.keras."),
        ("tensorflow.compat.v1.", "tensorflow."),
        ("tensorflow.compat.v2.", "tensorflow."),
        ("tensorflow.python.keras.", "tensorflow.keras."),
        ("tf_keras.", "tensorflow.keras."),
        ("keras.src.", "tensorflow.keras."),
        ("keras.", "tensorflow.keras."),
    ),
    calls=_CALLS,
    bases=_BASES,
    methods=_METHODS,
    no_gradient=frozenset({"tensorflow.stop_gradient"}),
)
