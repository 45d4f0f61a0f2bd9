"""Recognition of TensorFlow programs: sessions and graphs, Keras, tapes."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from gemini.instrument.inspect import recognise
from gemini.instrument.text.source_file import SourceFile


def found(text: str) -> list[tuple[int, str, str]]:
    source = SourceFile.from_text(textwrap.dedent(text).strip("\n"), "main.py", "main")
    return [(one.line, one.kind, one.name) for one in recognise([source])]


def kinds(text: str) -> list[tuple[int, str]]:
    return [(line, kind) for line, kind, _ in found(text)]


SESSION = """
import IMPORT as tf
def network(x):
    w = tf.get_variable("w", [3, 4])
    h = tf.nn.relu(tf.matmul(x, w))
    return tf.layers.dense(h, 10)
x = tf.placeholder(tf.float32, [None, 3])
with tf.device("/gpu:0"):
    logits = network(x)
loss = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=y, logits=logits)
train_op = tf.train.AdamOptimizer(1e-3).minimize(loss)
saver = tf.train.Saver()
with tf.Session() as sess:
    sess.run(tf.global_variables_initializer())
    for i in range(10):
        _, value = sess.run([train_op, loss], feed_dict={x: 1})
    for i in range(10):
        value = sess.run(loss, feed_dict={x: 1})
    saver.save(sess, "x")
"""


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow.compat.v1"])
def test_graph_and_session(name: str) -> None:
    assert kinds(SESSION.replace("IMPORT", name)) == [
        (2, "model"), (3, "layer"), (4, "op"), (4, "op"), (5, "layer"), (6, "data"), (7, "device"), (8, "model"),
        (9, "loss"), (10, "optimizer"), (10, "step"), (11, "checkpoint"), (12, "session"), (14, "train loop"),
        (15, "step"), (16, "eval loop"), (17, "forward"), (18, "checkpoint"),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["from tensorflow import keras", "import keras", "import tf_keras as keras"])
def test_keras_functional(name: str) -> None:
    text = f"""
    {name}
    def build():
        inputs = keras.Input((3,))
        return keras.Model(inputs, keras.layers.Dense(3)(inputs))
    model = build()
    model.compile(optimizer=keras.optimizers.Adam(), loss="mse")
    model.fit(xs, ys)
    model.evaluate(xs, ys)
    model.save("m.keras")
    """
    assert kinds(text) == [
        (2, "model"), (3, "layer"), (4, "model"), (4, "layer"), (5, "model"), (6, "optimizer"), (6, "optimizer"),
        (7, "train loop"), (8, "eval loop"), (9, "checkpoint"),
    ]  # fmt: skip


def test_keras_subclasses_and_tapes() -> None:
    text = """
    import tensorflow as tf
    class Block(tf.keras.layers.Layer): ...
    class Net(tf.keras.Model):
        def __init__(self):
            super().__init__()
            self.block = Block()
        def call(self, x):
            return tf.nn.softmax(self.block(x))
    net = Net()
    optimizer = tf.keras.optimizers.SGD()
    loss_fn = tf.keras.losses.MeanSquaredError()
    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_fn(y, net(x))
        grads = tape.gradient(loss, net.trainable_variables)
        optimizer.apply_gradients(zip(grads, net.trainable_variables))
    for x, y in tf.data.Dataset.from_tensor_slices(data).batch(2):
        step(x, y)
    """
    assert kinds(text) == [
        (2, "model"), (3, "model"), (6, "layer"), (8, "op"), (9, "model"), (10, "optimizer"), (11, "loss"),
        (13, "train step"), (15, "loss"), (15, "forward"), (16, "backward"), (17, "step"), (18, "train loop"),
        (18, "data"),
    ]  # fmt: skip


def test_another_librarys_fit_is_not_a_training_loop() -> None:
    text = """
    import tensorflow as tf
    from sklearn.linear_model import LogisticRegression
    model = LogisticRegression()
    model.fit(xs, ys)
    """
    assert kinds(text) == []


def test_no_framework_is_imported() -> None:
    code = """
    import sys
    from gemini.instrument.inspect import recognise
    from gemini.instrument.text.source_file import SourceFile
    assert recognise([SourceFile.from_text("import torch\\nimport tensorflow as tf\\ntorch.nn.Linear(1, 1)", "a.py")])
    assert not {"torch", "tensorflow", "numpy"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


def test_a_script_in_the_manner_of_bert() -> None:
    text = (
        "import tensorflow as tf\n"
        "x = tf.contrib.layers.layer_norm(inputs)\n"
        "start = tf.contrib.layers.xavier_initializer()\n"
        "optimizer = tf.contrib.tpu.CrossShardOptimizer(optimizer)\n"
        "data = data.apply(tf.contrib.data.map_and_batch(decode, 8))\n"
        "spec = tf.contrib.tpu.TPUEstimatorSpec(mode, loss=loss)\n"
        "estimator = tf.contrib.tpu.TPUEstimator(model_fn=model_fn)\n"
        "estimator.train(input_fn, max_steps=3)\n"
        "estimator.evaluate(input_fn)\n"
    )
    found = [(one.line, one.kind) for one in recognise([SourceFile.from_text(text, "train.py", "__main__")])]
    assert found == [
        (2, "layer"), (4, "optimizer"), (5, "data"), (7, "trainer"), (8, "train loop"), (9, "eval loop"),
    ]  # fmt: skip
