"""Sharded variables: weights and slots exist in shards on their devices, and updates move no whole tensor."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow.compat.v1 as tf

from gemini.config.gemini_config import GeminiConfig
from gemini.errors import GraphError
from tests.tensorflow.models import classics
from tests.tensorflow.models.graph_training import engine, sharded

SHARDS = sharded(1, 2, 2)


class WeightDecay(tf.train.Optimizer):
    """Adam with weight decay, its slots and updates written by hand."""

    def __init__(self) -> None:
        super().__init__(False, "WeightDecay")

    def apply_gradients(
        self, grads_and_vars: list[tuple[tf.Tensor, tf.Variable]], global_step: object = None, name: str | None = None
    ) -> tf.Operation:
        """Make one step."""
        del global_step
        updates = []
        for gradient, weight in grads_and_vars:
            base = weight.op.name
            first = tf.get_variable(base + "/m", weight.shape, trainable=False, initializer=tf.zeros_initializer())
            second = tf.get_variable(base + "/v", weight.shape, trainable=False, initializer=tf.zeros_initializer())
            m = 0.9 * first + 0.1 * gradient
            v = 0.99 * second + 0.01 * tf.square(gradient)
            step = m / (tf.sqrt(v) + 1e-3) + 0.01 * weight
            updates += [weight.assign(weight - 0.02 * step), first.assign(m), second.assign(v)]
        return tf.group(*updates, name=name)


def train(config: GeminiConfig | None) -> tuple[list[float], dict[str, np.ndarray], tf.Session]:
    with engine(config):
        case = classics.mlp()
        weights = tf.trainable_variables()
        gradients, _ = tf.clip_by_global_norm(tf.gradients(case.loss, weights), 1.0)
        step = WeightDecay().apply_gradients(list(zip(gradients, weights)), name="train")
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            losses = [float(session.run([case.loss, step], case.batch(8, at))[0]) for at in range(4)]
            values = session.run({one.op.name: one for one in tf.global_variables()})
    return losses, values, session


def ops_behind(graph: tf.Graph, name: str) -> Iterator[tf.Operation]:
    stack, seen = [graph.get_operation_by_name(name)], set()
    while stack:
        op = stack.pop()
        if op not in seen:
            seen.add(op)
            yield op
            if op.type == "RandomUniform":  # the shape is fed
                continue
            stack += [*(tensor.op for tensor in op.inputs), *op.control_inputs]


def test_slots_written_by_hand_follow_their_weights_and_no_update_joins_them() -> None:
    losses, values, _ = train(None)
    found, stored, session = train(SHARDS)
    np.testing.assert_allclose(found, losses, rtol=1e-6)
    for name, value in values.items():
        np.testing.assert_allclose(stored[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name)
    mirror = session._gemini_twin.mirror
    assert {f"w0{slot}" for slot in ("", "/m", "/v")} | {f"w1{slot}" for slot in ("", "/m", "/v")} <= set(
        mirror.variables.layout_of
    )
    for shard, device in enumerate(("/device:CPU:0", "/device:CPU:1")):
        handle = mirror.op(f"w0/m/shard_{shard}")
        assert (handle.device, [one.size for one in handle.get_attr("shape").dim]) == (device, [12, 8])
    behind = list(ops_behind(mirror.graph, "gemini/twin0/rest/train"))
    assert any(op.type == "AssignVariableOp" and op.device == "/device:CPU:1" for op in behind)
    assert not [op.name for op in behind if op.type == "ConcatV2"]


def test_a_reader_of_rows_after_the_first_run_is_refused_and_before_it_leaves_the_variable_whole() -> None:
    for is_late in (False, True):
        with engine(SHARDS):
            case = classics.mlp()
            step = tf.train.GradientDescentOptimizer(0.1).minimize(case.loss)
            weight = next(one for one in tf.trainable_variables() if one.op.name == "w0")
            rows = None if is_late else tf.gather(weight, [1, 2])
            with tf.Session() as session:
                session.run(tf.global_variables_initializer())
                session.run(step, case.batch(8, 0))
                stored = session._gemini_twin.mirror.variables
                assert ("w0" in stored) is is_late
                if rows is not None:
                    assert session.run(rows).shape == (2, 16)
                    continue
                tf.gather(weight, [1, 2])
                with pytest.raises(GraphError, match=r"takes w0, which exists in shards"):
                    session.run(step, case.batch(8, 0))
