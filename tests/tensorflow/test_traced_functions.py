"""Programs of TensorFlow 2: numbers of `python`, operations on the servers, and what is refused."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

KERAS = """
import sys
import numpy as np, tensorflow as tf, keras
if "--placement" in sys.argv:
    tf.debugging.set_log_device_placement(True)
keras.utils.set_random_seed(1)
model = keras.Sequential([
    keras.Input((16,)), keras.layers.Dense(64, activation="relu"), keras.layers.LayerNormalization(),
    keras.layers.Dropout(0.2), keras.layers.Dense(64, activation="tanh"), keras.layers.Dense(4)])
model.compile(keras.optimizers.Adam(1e-2, clipnorm=1.0),
              keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
data = np.random.RandomState(0)
x, y = data.rand(40, 16).astype("float32"), data.randint(0, 4, 40)
history = model.fit(x, y, batch_size=16, epochs=3, verbose=0, validation_split=0.2).history
for name, values in sorted(history.items()):
    print(name, " ".join("%.5f" % value for value in values))
print("evaluate", " ".join("%.5f" % value for value in model.evaluate(x, y, verbose=0)))
print("predict %.4f" % model.predict(x, verbose=0).sum())
"""
OUTPUTS = """
# Keras starts a step more at the end of data of unknown length, and averages losses of outputs over batches there
hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(8, activation="tanh")(given := keras.Input((16,))))
model = keras.Model(given, {"a": keras.layers.Dense(4, name="a")(hidden), "b": keras.layers.Dense(1, name="b")(hidden)})
model.compile(keras.optimizers.Adam(keras.optimizers.schedules.ExponentialDecay(1e-2, 2, 0.5)),
              {"a": keras.losses.SparseCategoricalCrossentropy(from_logits=True), "b": "mse"},
              loss_weights={"a": 1.0, "b": 0.3}, metrics={"a": "accuracy", "b": "mae"})
samples = tf.data.Dataset.from_tensor_slices((x[:12], {"a": y[:12], "b": x[:12, :1]}))
batches = samples.filter(lambda x, y: True).batch(8)
history = model.fit(batches, epochs=2, verbose=0).history
for name, values in sorted(history.items()):
    print(name, " ".join("%.5f" % value for value in values))
print("iterations %.1f" % float(model.optimizer.iterations))
"""
TAPES = """
import tensorflow as tf
v = tf.Variable(tf.ones([4, 8])); w = tf.Variable(tf.fill([8, 1], 0.1)); table = tf.Variable(tf.ones([5, 4]))
x = tf.reshape(tf.range(32, dtype=tf.float32), [8, 4]) / 32
def line(values):
    print(" ".join("%.6f" % float(one) for one in values))

@tf.function
def step(ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.tanh((x + tf.gather(table, ids)) @ v) @ w - 1.0))
    for one, gradient in zip((v, w, table), tape.gradient(loss, (v, w, table))):
        one.assign_sub(0.1 * tf.convert_to_tensor(gradient))
    return loss
line(step(tf.range(8) % 5) for _ in range(4))

@tf.function
def two_losses(x):
    with tf.GradientTape() as tape:
        hidden = tf.tanh(x @ v)
        losses = [tf.square(hidden @ w - 1.0), tf.reduce_mean(hidden)]
    gradients = tape.gradient(losses, {"v": v, "w": w})
    return tf.reduce_sum(tf.abs(gradients["v"])), tf.reduce_sum(tf.abs(gradients["w"]))
line(two_losses(x))

@tf.function
def partly_recorded(x):
    hidden = tf.tanh(x @ v)
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(hidden @ w + tf.reduce_sum(v)))
    gradients = tape.gradient(loss, [v, w])
    return tf.reduce_sum(tf.abs(gradients[0])), tf.reduce_sum(tf.abs(gradients[1]))
line(partly_recorded(x))

@tf.function(input_signature=[tf.TensorSpec([None, 4])])
def any_size(x):
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.tanh(x @ v) @ w))
    return tf.reduce_sum(tape.gradient(loss, v))
line([any_size(x)])
"""
EAGER = """
import tensorflow as tf
w = tf.Variable(tf.ones([4, 1])); x = tf.ones([8, 4])
with tf.GradientTape() as watched:
    watched.watch(x)
    y = tf.reduce_sum(x * x)
print(float(tf.reduce_sum(watched.gradient(y, x))), flush=True)
with tf.GradientTape() as tape:
    loss = tf.reduce_mean(tf.square(x @ w))
tape.gradient(loss, [w])
"""
WRONG = """
from dataclasses import replace
from gemini.tensorflow.rules import registry
mean = registry.RULES["Mean"]
def doubled(op, layouts):  # a rule with a fault: as a wrong scale, which Adam would hide
    way = mean(op, layouts)
    return replace(way, scale=2 * way.scale) if way is not None else None
registry.RULES["Mean"] = doubled
"""
PIPELINE = ("--mode", "pipeline", "--pipeline-degree", "2", "--accum-degree", "4")
SHARDING = ("--mode", "sharding", "--workers", "2", "--accum-degree", "2")
HYBRID = ("--mode", "hybrid", "--pipeline-degree", "2", "--sharding-size", "2", "--accum-degree", "2")


def run(
    folder: Path, program: str, *options: str, arguments: tuple[str, ...] = (), level: str = "3"
) -> tuple[str, str, int]:
    (folder / "train.py").write_text(program)
    command = [str(Path(sys.executable).with_name("gemini_python")), *options] if options else [sys.executable]
    done = subprocess.run(
        [*command, "train.py", *arguments], cwd=folder, capture_output=True, text=True, timeout=280, check=False,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": level, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return done.stdout, done.stderr, done.returncode


def assert_same(said: str, alone: str) -> None:
    """Assert that two outputs have the same words, and the same numbers but for rounding."""
    assert alone
    assert re.sub(r"[-\d.]+", "#", said) == re.sub(r"[-\d.]+", "#", alone)
    numbers = [[float(one) for one in re.findall(r"-?\d+\.\d+", text)] for text in (said, alone)]
    assert numbers[0] == pytest.approx(numbers[1], rel=2e-5, abs=2e-5)


@pytest.mark.parametrize(
    ("options", "shape"),
    [
        (PIPELINE, "stages 2 × shards 1, micro-batches 4, schedule 1f1b"),
        pytest.param(SHARDING, "stages 1 × shards 2, micro-batches 2, schedule none", marks=pytest.mark.slow),
        pytest.param(HYBRID, "stages 2 × shards 2, micro-batches 2, schedule 1f1b", marks=pytest.mark.slow),
    ],
)
def test_keras_prints_what_it_prints_under_python(tmp_path: Path, options: tuple[str, ...], shape: str) -> None:
    alone, _, _ = run(tmp_path, KERAS + OUTPUTS)
    said, errors, code = run(tmp_path, KERAS + OUTPUTS, *options)
    assert code == 0, errors[-2000:]
    assert_same(said, alone)
    notices = [line for line in errors.splitlines() if line.startswith("gemini: ")]
    assert [re.sub(r"\(.*?\)|, operations.*", "", line) for line in notices] == [
        f"gemini: step of compile_loss/{loss}:0 : {shape}"
        for loss in ("sparse_categorical_crossentropy/div_no_nan", "add_5", "add_5")
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "place", "tasks"),
    [
        (PIPELINE, r"F(\d)/S(\d)", {(piece, stage, stage) for piece in "0123" for stage in "01"}),
        (SHARDING, r"F(\d)/S0/gemini/twin0/shards/F(\d)", {(piece, shard, shard) for piece in "01" for shard in "01"}),
    ],
    ids=["pipeline", "sharding"],
)
def test_the_operations_of_stages_and_shards_run_on_their_servers(
    tmp_path: Path, options: tuple[str, ...], place: str, tasks: set[tuple[str, str, str]]
) -> None:
    said, errors, _ = run(tmp_path, KERAS, *options, arguments=("--placement",), level="0")
    placed = re.findall(rf"gemini/twin0/{place}/\S*MatMul: \(MatMul\): \S*task:(\d)", said + errors)
    assert set(placed) == tasks


@pytest.mark.slow
def test_tapes_in_functions(tmp_path: Path) -> None:
    alone, _, _ = run(tmp_path, TAPES)
    said, errors, code = run(tmp_path, TAPES, *PIPELINE)
    assert code == 0, errors[-2000:]
    assert len(alone.splitlines()) == 4
    assert_same(said, alone)
    notices = [line for line in errors.splitlines() if line.startswith("gemini: ")]
    assert len(notices) == 4, notices
    assert all("micro-batches 4" in line for line in notices[:2])
    assert "was computed outside the tape" in notices[2]
    assert "traced for batches of any size" in notices[3]


def test_a_function_whose_twin_differs_on_its_first_step_runs_as_the_script_built_it(tmp_path: Path) -> None:
    alone, _, _ = run(tmp_path, TAPES)
    said, errors, code = run(tmp_path, WRONG + TAPES, *PIPELINE)
    assert code == 0, errors[-2000:]
    assert said == alone
    notices = [line for line in errors.splitlines() if line.startswith("gemini: ")]
    assert "runs on the untouched graph: the loss of the first step was" in notices[0]


def test_an_eager_training_step_is_refused(tmp_path: Path) -> None:
    said, errors, code = run(tmp_path, EAGER, *PIPELINE)
    assert (said, code) == ("64.0\n", 1)
    assert "a training step runs eagerly, which mode pipeline cannot split: a tape outside tf.function" in errors
    assert "→ put @tf.function on the function with the tape, or run the script with python" in errors
