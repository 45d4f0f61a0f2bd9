"""Scripts of TensorFlow 1, as they were written, under `gemini_python` and dumped; what a program loads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODEL = """
import tensorflow as tf

def layer_norm(x):
    return tf.contrib.layers.layer_norm(inputs=x, begin_norm_axis=-1, begin_params_axis=-1)

def encode(ids, vocabulary, width):
    table = tf.get_variable("table", [vocabulary, width], initializer=tf.truncated_normal_initializer(stddev=0.02))
    hidden = tf.nn.embedding_lookup(table, ids)
    hidden = tf.layers.dense(hidden, width, activation=tf.tanh, name="dense")
    return layer_norm(tf.reduce_sum(hidden, axis=1, keep_dims=False))
"""
TRAIN = '''
"""Trains a classifier in the manner of BERT-era scripts."""
from __future__ import print_function
import model
import tensorflow as tf

flags = tf.flags
FLAGS = flags.FLAGS
flags.DEFINE_string("output_dir", None, "where")
flags.DEFINE_integer("steps", 4, "how many")

def write(path):
    writer = tf.python_io.TFRecordWriter(path)
    for at in range(16):
        ids = [(at * 7 + k) % 11 for k in range(5)]
        features = tf.train.Features(feature={
            "ids": tf.train.Feature(int64_list=tf.train.Int64List(value=ids)),
            "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[at % 2]))})
        writer.write(tf.train.Example(features=features).SerializeToString())
    writer.close()

def input_fn_builder(path, is_training):
    def input_fn(params):
        spec = {"ids": tf.FixedLenFeature([5], tf.int64), "label": tf.FixedLenFeature([], tf.int64)}
        def decode(record):
            example = tf.parse_single_example(record, spec)
            return {name: tf.to_int32(value) for name, value in example.items()}
        d = tf.data.TFRecordDataset(path)
        if is_training:
            d = d.repeat()
        return d.apply(tf.contrib.data.map_and_batch(decode, batch_size=params["batch_size"], drop_remainder=True))
    return input_fn

def model_fn(features, labels, mode, params):
    logits = tf.layers.dense(model.encode(features["ids"], 11, 6), 2)
    example_loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=features["label"], logits=logits)
    loss = tf.reduce_mean(example_loss)
    train_op = None
    if mode == tf.estimator.ModeKeys.TRAIN:
        step = tf.train.get_or_create_global_step()
        rate = tf.train.polynomial_decay(0.05, step, 100, end_learning_rate=0.0)
        tvars = tf.trainable_variables()
        grads, _ = tf.clip_by_global_norm(tf.gradients(loss, tvars), clip_norm=1.0)
        train_op = tf.train.AdamOptimizer(rate).apply_gradients(zip(grads, tvars), global_step=step)
        hook = tf.train.LoggingTensorHook({"loss": loss}, every_n_iter=1, formatter=lambda v: "loss %.6f" % v["loss"])
        return tf.contrib.tpu.TPUEstimatorSpec(mode=mode, loss=loss, train_op=train_op, training_hooks=[hook])
    metrics = (lambda l: {"mean": tf.metrics.mean(values=l)}, [example_loss])
    return tf.contrib.tpu.TPUEstimatorSpec(mode=mode, loss=loss, eval_metrics=metrics)

def main(_):
    tf.logging.set_verbosity(tf.logging.INFO)
    tf.gfile.MakeDirs(FLAGS.output_dir)
    path = FLAGS.output_dir + "/data.tfrecord"
    write(path)
    config = tf.contrib.tpu.RunConfig(
        model_dir=FLAGS.output_dir, save_checkpoints_steps=100,
        tpu_config=tf.contrib.tpu.TPUConfig(
            per_host_input_for_training=tf.contrib.tpu.InputPipelineConfig.PER_HOST_V2))
    estimator = tf.contrib.tpu.TPUEstimator(
        use_tpu=False, model_fn=model_fn, config=config, train_batch_size=8, eval_batch_size=8)
    estimator.train(input_fn=input_fn_builder(path, True), max_steps=FLAGS.steps)
    result = estimator.evaluate(input_fn=input_fn_builder(path, False), steps=2)
    print("result", " ".join("%s %.5f" % (key, result[key]) for key in sorted(result)))

if __name__ == "__main__":
    flags.mark_flag_as_required("output_dir")
    tf.app.run()
'''
SESSION = """
import sys
import numpy as np, tensorflow as tf
x, y = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None, 1])
tf.set_random_seed(3)
cell = tf.nn.rnn_cell.GRUCell(4)
_, state = tf.nn.dynamic_rnn(cell, tf.reshape(x, [-1, 2, 2]), dtype=tf.float32)
loss = tf.losses.mean_squared_error(y, tf.layers.dense(state, 1))
train = tf.train.MomentumOptimizer(0.1, 0.9).minimize(loss)
average, weight = tf.train.ExponentialMovingAverage(0.5), tf.trainable_variables()[0]
update = average.apply([weight])
copied = tf.Variable(weight.initialized_value(), trainable=False)
read = average.average(weight) or weight
data = np.random.RandomState(0)
with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for _ in range(3):
        print("loss %.6f" % session.run([loss, train], {x: data.rand(8, 4), y: data.rand(8, 1)})[0])
    session.run(update)
    print("average", np.allclose(session.run(read), session.run((weight + copied) / 2), rtol=1e-5, atol=0))
print("torch" in sys.modules)
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=280, check=False,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done


def launcher() -> str:
    return str(Path(sys.executable).with_name("gemini_python"))


def lines(text: str, word: str) -> list[str]:
    return [line.partition(word)[2] for line in text.splitlines() if word in line]


def test_a_script_in_the_manner_of_bert_and_its_dump(program: Path) -> None:
    done = run(program, launcher(), "train.py", "--output_dir=one")
    losses = [one for one in lines(done.stderr, "INFO:tensorflow:loss") if "=" not in one]
    assert len(losses) == 4
    assert losses[0] > losses[-1]
    assert "global_step 4.00000" in done.stdout
    assert (program / "one" / "model.ckpt-4.index").exists()
    run(program, launcher(), "--dump", "dumped", "train.py")
    dumped = (program / "dumped" / "train.py").read_text()
    assert "from gemini.tensorflow.compat.graph_mode import tf1 as tf" in dumped
    assert "#   tensorflow-imports: 1 edit" in dumped
    again = run(program, sys.executable, "dumped/train.py", "--output_dir=two")
    assert again.stdout == done.stdout
    assert [one for one in lines(again.stderr, "INFO:tensorflow:loss") if "=" not in one] == losses


def test_a_session_loads_no_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SESSION)
    done = run(tmp_path, launcher(), "train.py")
    assert len(lines(done.stdout, "loss ")) == 3
    assert lines(done.stdout, "average ") == ["True"]
    assert done.stdout.splitlines()[-1] == "False"


def test_a_torch_program_loads_no_tensorflow(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import sys, torch\nnet = torch.nn.Linear(2, 1)\nopt = torch.optim.SGD(net.parameters(), 0.1)\n"
        "for _ in range(3):\n    opt.zero_grad(); net(torch.ones(4, 2)).sum().backward(); opt.step()\n"
        "print(sorted({'tensorflow', 'keras', 'tf_keras'} & sys.modules.keys()))\n"
    )
    assert run(tmp_path, launcher(), "--mode", "pipeline", "train.py").stdout == "[]\n"
