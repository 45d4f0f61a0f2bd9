"""Twin sessions: what scripts do with sessions besides training, on a twin as on one device."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import ConfigError, GeminiError, GraphError
from gemini.tensorflow import entry
from tests.tensorflow.models import classics  # sets up the environment of TensorFlow
from tests.tensorflow.models.graph_training import engine, in_process, sharded

TWIN = in_process(2, 4)
SHARDS = sharded(1, 2, 4)


@pytest.fixture(params=[None, TWIN, SHARDS], ids=["alone", "twin", "shards"])
def config(request: pytest.FixtureRequest) -> GeminiConfig | None:
    """One device, a pipeline, and shards."""
    return request.param  # type: ignore[no-any-return]


def train_steps(session: tf.Session, case: classics.Case, step: tf.Operation, seeds: Iterator[int]) -> list[float]:
    return [float(session.run([case.loss, step], case.batch(8, seed))[0]) for seed in seeds]


def save(folder: Path, config: GeminiConfig | None, start: Path | None = None) -> list[float]:
    """Train three steps from the start or from a checkpoint, and save."""
    with engine(config):
        case = classics.mlp()
        step = tf.train.AdamOptimizer(1e-2).minimize(case.loss, tf.train.get_or_create_global_step())
        saver = tf.train.Saver()
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            if start is not None:
                saver.restore(session, str(start))
            losses = train_steps(session, case, step, iter(range(3)))
            saver.save(session, str(folder / "model"))
    return losses


def read(folder: Path) -> dict[str, np.ndarray]:
    reader = tf.train.load_checkpoint(str(folder / "model"))
    return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}


@pytest.mark.parametrize("twin", [TWIN, SHARDS], ids=["stages", "shards"])
def test_checkpoints_are_those_of_one_device_both_ways(tmp_path: Path, twin: GeminiConfig) -> None:
    folders = [tmp_path / name for name in ("alone", "twin", "alone_again", "twin_again")]
    for folder in folders:
        folder.mkdir()
    first = save(folders[0], None)
    assert save(folders[1], twin) == pytest.approx(first, rel=1e-6)
    one, other = read(folders[0]), read(folders[1])
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.shape, value.dtype) == (other[name].shape, other[name].dtype)
        np.testing.assert_allclose(other[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)
    crossed = save(folders[2], None, folders[1] / "model")
    assert save(folders[3], twin, folders[0] / "model") == pytest.approx(crossed, rel=1e-5)


def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_lost(tmp_path: Path) -> None:
    save(tmp_path, None)
    with engine(TWIN):
        case = classics.mnist_cnn()
        step = tf.train.AdamOptimizer(1e-2).minimize(case.loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(tf.errors.NotFoundError, match="not found in checkpoint"):
                tf.train.Saver().restore(session, str(tmp_path / "model"))
            assert train_steps(session, case, step, iter(range(1)))


def test_a_monitored_session_trains_on_data_sets_with_a_schedule_and_summaries(tmp_path: Path) -> None:
    found = []
    for config in (None, TWIN):
        folder = tmp_path / str(config is None)
        with engine(config):
            random = np.random.RandomState(0)
            data = tf.data.Dataset.from_tensor_slices((random.rand(40, 6).astype("f"), random.randint(0, 3, 40)))
            x, y = tf.data.make_one_shot_iterator(data.shuffle(40, seed=5).repeat(2).batch(9)).get_next()
            start = tf.random_uniform_initializer(-0.5, 0.5, seed=2)
            h = tf.nn.relu(tf.layers.dense(x, 8, kernel_initializer=start))
            h = tf.nn.dropout(tf.layers.batch_normalization(h, training=True), rate=0.3)
            loss = tf.losses.sparse_softmax_cross_entropy(y, tf.layers.dense(h, 3, kernel_initializer=start))
            steps = tf.train.get_or_create_global_step()
            rate = tf.train.exponential_decay(0.5, steps, 3, 0.9)
            with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):  # in front of the gradients too
                train = tf.train.MomentumOptimizer(rate, 0.9).minimize(loss, steps)
            tf.summary.scalar("loss", loss)
            losses = []
            with tf.train.MonitoredTrainingSession(
                checkpoint_dir=str(folder), save_checkpoint_steps=4, save_summaries_steps=2, log_step_count_steps=None
            ) as session:
                while not session.should_stop():
                    losses.append(session.run([loss, rate, train])[:2])
            found.append((losses, tf.train.load_checkpoint(str(folder))))
            assert list(folder.glob("events*"))
            if config is not None:
                assert {report.batch for report in entry.reports()} == {"9, 9×6", "8, 8×6"}
    assert len(found[0][0]) == 9
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-6)
    for name in found[0][1].get_variable_to_shape_map():
        np.testing.assert_allclose(found[1][1].get_tensor(name), found[0][1].get_tensor(name), rtol=1e-5, atol=1e-6)


def test_evaluation_intermediates_and_feeds_of_tensors_in_one_session(config: GeminiConfig | None) -> None:
    with engine(config):
        x, y = tf.placeholder(tf.float32, [None, 5]), tf.placeholder(tf.float32, [None])
        keep = tf.placeholder_with_default(1.0, [])
        h = tf.layers.dense(x, 6, activation=tf.tanh, name="hidden")
        out = tf.layers.dense(tf.nn.dropout(h, rate=1 - keep), 1, name="out")[:, 0]
        loss = tf.reduce_mean(tf.square(out - y))
        rate = tf.Variable(0.1, trainable=False)
        gradients = tf.gradients(loss, tf.trainable_variables())
        step = tf.train.GradientDescentOptimizer(rate).apply_gradients(zip(gradients, tf.trainable_variables()))
        total, update = tf.metrics.mean(tf.abs(out - y))
        random = np.random.RandomState(0)
        batches = [{x: random.rand(6, 5), y: random.rand(6), keep: 0.5} for _ in range(4)]
        with tf.Session() as session:
            session.run([tf.global_variables_initializer(), tf.local_variables_initializer()])
            session.run([one.initializer for one in tf.trainable_variables()], {})
            for at, one in enumerate(tf.trainable_variables()):
                one.load(np.full(one.shape.as_list(), 0.1 * (at + 1), np.float32), session)
            results = [session.run([loss, h, gradients, step, update], batch) for batch in batches]
            results.append(session.run([loss, out], {x: batches[0][x], y: batches[0][y]}))
            results.append(session.run([loss, step], {**batches[0], rate: 0.5}))
            results.append(session.run({"total": total, "weights": tf.trainable_variables()}))
            results.append(session.run([loss, step], {**batches[0], out: random.rand(6)}))
            step_of = session.make_callable([loss, step], [x, y])
            results.append(step_of(batches[1][x], batches[1][y]))
        flat = [np.asarray(one, np.float64).ravel() for one in tf.nest.flatten(results) if one is not None]
        expected = _expected.setdefault("intermediates", flat)
        for at, (one, other) in enumerate(zip(flat, expected, strict=True)):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7, err_msg=str(at))
        if config is not None:
            assert sum(not report.runs_twin for report in entry.reports()) == 1  # with a feed in front of the loss


_expected: dict[str, list[np.ndarray]] = {}


def test_several_losses_and_optimizers(config: GeminiConfig | None) -> None:
    with engine(config):
        noise, real = tf.placeholder(tf.float32, [None, 4]), tf.placeholder(tf.float32, [None, 3])
        with tf.variable_scope("generator"):
            made = tf.layers.dense(tf.layers.dense(noise, 8, tf.nn.relu), 3)

        def judge(x: tf.Tensor) -> tf.Tensor:
            with tf.variable_scope("judge", reuse=tf.AUTO_REUSE):
                return tf.layers.dense(tf.layers.dense(x, 8, tf.nn.leaky_relu, name="a"), 1, name="b")

        good, bad = judge(real), judge(made)
        loss_judge = tf.reduce_mean(tf.nn.softplus(-good)) + tf.reduce_mean(tf.nn.softplus(bad))
        loss_generator = tf.reduce_mean(tf.nn.softplus(-bad))
        steps = [
            tf.train.GradientDescentOptimizer(0.1).minimize(loss, var_list=tf.trainable_variables(scope))
            for loss, scope in ((loss_judge, "judge"), (loss_generator, "generator"))
        ]
        random = np.random.RandomState(0)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for at, one in enumerate(tf.trainable_variables()):
                one.load(np.full(one.shape.as_list(), 0.1 * (at % 3 + 1), np.float32), session)
            for at in range(4):
                feed = {noise: random.rand(8, 4), real: random.rand(8, 3)}
                session.run(steps if at == 3 else steps[at % 2], feed)
            values = session.run([loss_judge, loss_generator, *tf.trainable_variables()], feed)
        expected = _expected.setdefault("losses", [np.asarray(one) for one in values])
        for one, other in zip(values, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
        if config is not None:
            assert all(report.runs_twin for report in entry.reports()), [one.line for one in entry.reports()]


def test_an_op_without_a_rule_runs_the_untouched_graph_with_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with engine(GeminiConfig(**{**TWIN.to_dict(), "quiet": False})):
        x = tf.placeholder(tf.float32, [None, 4])
        h = tf.layers.dense(x, 4)
        h = tf.math.real(tf.signal.fft(tf.cast(h, tf.complex64)))
        step = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(h**2))
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for _ in range(2):
                session.run(step, {x: np.ones((8, 4))})
    lines = [line for line in capsys.readouterr().err.splitlines() if "untouched graph" in line]
    assert len(lines) == 1
    assert re.search(r"runs on the untouched graph: no rule for (FFT|Complex)", lines[0])


def test_strict_raises_instead() -> None:
    with engine(in_process(2, 4, strict=True)):
        x = tf.placeholder(tf.float32, [None, 4])
        step = tf.train.GradientDescentOptimizer(0.1).minimize(
            tf.reduce_sum(tf.py_func(np.abs, [tf.layers.dense(x, 4)], tf.float32))
            + tf.reduce_sum(tf.layers.dense(x, 2))
        )
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            with pytest.raises(GraphError, match="PyFunc"):
                session.run(step, {x: np.ones((8, 4))})


def test_what_the_script_adds_later_runs_and_what_it_changes_is_refused() -> None:
    with engine(TWIN):
        case = classics.mlp()
        step = tf.train.GradientDescentOptimizer(0.1).minimize(case.loss)
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            train_steps(session, case, step, iter(range(2)))
            doubled = 2 * case.logits
            one, other = session.run([doubled, case.logits], case.batch(4, 0))
            assert one.shape == other.shape
            later = tf.train.MomentumOptimizer(0.1, 0.5).minimize(case.loss)
            session.run(tf.variables_initializer([v for v in tf.global_variables() if "Momentum" in v.name]))
            train_steps(session, case, later, iter(range(2)))
            with pytest.raises(GraphError, match="partial_run"):
                session.partial_run_setup([case.loss], [])
            assert all(report.runs_twin for report in entry.reports())
            case.loss.op._set_device("/device:CPU:0")
            tf.constant(1.0)
            with pytest.raises(GraphError, match=r"was changed after the first run of its session"):
                train_steps(session, case, step, iter(range(1)))


def test_stages_need_work_and_devices() -> None:
    with engine(in_process(40, 4)):
        x = tf.placeholder(tf.float32, [None, 2])
        step = tf.train.GradientDescentOptimizer(0.1).minimize(tf.reduce_mean(tf.layers.dense(x, 1)))
        with tf.Session() as session, pytest.raises(GeminiError, match="40 stages are requested"):
            session.run(step, {x: np.ones((4, 2))})
    missing = GeminiConfig(device_mapping={"stage_0": {"shard_0": "/device:CPU:0"}, "stage_1": {"shard_0": "/gpu:7"}})
    with engine(missing):
        x = tf.placeholder(tf.float32, [None, 2])
        loss = tf.reduce_mean(tf.layers.dense(tf.layers.dense(x, 4), 1))
        tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        with tf.Session() as session, pytest.raises(ConfigError, match="no device /device:GPU:7"):
            session.run(tf.global_variables_initializer())


def test_a_fed_flag_chooses_the_branches_that_a_twin_divides(config: GeminiConfig | None) -> None:
    with engine(config):
        x, y = tf.placeholder(tf.float32, [None, 6]), tf.placeholder(tf.int64, [None])
        training = tf.placeholder_with_default(False, [])
        h = tf.layers.batch_normalization(tf.layers.dense(x, 16, tf.nn.relu), training=training, momentum=0.5)
        h = tf.layers.dropout(tf.layers.dense(h, 16, tf.tanh), 0.5, training=training, seed=4)
        loss = tf.losses.sparse_softmax_cross_entropy(y, tf.layers.dense(h, 3))
        with tf.control_dependencies(tf.get_collection(tf.GraphKeys.UPDATE_OPS)):  # inside conditionals
            step = tf.train.GradientDescentOptimizer(0.1).minimize(loss)
        random = np.random.RandomState(0)
        losses = []
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            for at, one in enumerate(tf.trainable_variables()):
                one.load(np.random.RandomState(at).randn(*one.shape.as_list()).astype("f"), session)
            for _ in range(3):
                feed = {x: random.rand(8, 6), y: random.randint(0, 3, 8)}
                losses.append(session.run([loss, step], {**feed, training: True})[0])
                losses.append(session.run(loss, feed))
        np.testing.assert_allclose(losses, _expected.setdefault("branches", losses), rtol=1e-5)
        for report in entry.reports():
            assert report.reason == ""
            assert report.micro_batches == 4


def test_random_numbers_in_a_loop_are_drawn_by_one_op_and_layers_behind_it_divide() -> None:
    for config in (TWIN, SHARDS):
        with engine(config):
            x, y = tf.placeholder(tf.float32, [None, 5, 4]), tf.placeholder(tf.int64, [None])
            cell = tf.nn.rnn_cell.DropoutWrapper(tf.nn.rnn_cell.GRUCell(8), output_keep_prob=0.5, seed=3)
            h, _ = tf.nn.dynamic_rnn(cell, x, dtype=tf.float32)
            h = tf.layers.dense(tf.layers.dense(h[:, -1], 16, tf.nn.relu), 16, tf.nn.relu)
            loss = tf.losses.sparse_softmax_cross_entropy(y, tf.layers.dense(h, 4))
            step = tf.train.AdamOptimizer(0.01).minimize(loss)
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                for _ in range(2):
                    assert session.run([loss, step], {x: np.ones((8, 5, 4)), y: np.zeros(8)})[0] > 0
            (report,) = entry.reports()
            assert report.reason == ""
            assert report.comparison is not None
            assert report.comparison.gradient_error <= 1e-5
            assert min(worker.ops for worker in report.workers) > (10 if config is SHARDS else -1)
