"""Training of a model case in a session, alone or on a twin, and the comparison of both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow.compat.v1 as tf

from gemini.config.gemini_config import GeminiConfig
from gemini.tensorflow import entry
from gemini.tensorflow.twin_report import TwinReport
from tests.tensorflow.models.classics import Case  # sets up the environment of TensorFlow

OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: tf.train.GradientDescentOptimizer(0.1),
    "momentum": lambda: tf.train.MomentumOptimizer(0.1, 0.9),
    "adam": lambda: tf.train.AdamOptimizer(1e-2),
}


@dataclass
class Run:
    """What a training run gave."""

    losses: list[float] = field(default_factory=list)
    logits: list[Any] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    variables: dict[str, Any] = field(default_factory=dict)
    reports: tuple[TwinReport, ...] = ()


def in_process(stages: int, micro_batches: int, **more: Any) -> GeminiConfig:
    """Return a pipeline over logical devices of this process."""
    mapping = {f"stage_{at}": {"shard_0": f"/device:CPU:{at}"} for at in range(stages)}
    return GeminiConfig(mode="pipeline", device_mapping=mapping, accum_degree=micro_batches, quiet=True, **more)


def sharded(stages: int, shards: int, micro_batches: int, **more: Any) -> GeminiConfig:
    """Return shards, in one or several stages, over logical devices of this process."""
    mapping = {
        f"stage_{at}": {f"shard_{one}": f"/device:CPU:{at * shards + one}" for one in range(shards)}
        for at in range(stages)
    }
    mode = "hybrid" if stages > 1 else "sharding"
    return GeminiConfig(mode=mode, device_mapping=mapping, accum_degree=micro_batches, quiet=True, **more)


@contextmanager
def engine(config: GeminiConfig | None) -> Iterator[None]:
    """Run a block with the engine installed, or with the same settings of TensorFlow and no engine."""
    tf.enable_resource_variables()
    tf.enable_control_flow_v2()
    if config is not None:
        entry.install(config)
    try:
        with tf.Graph().as_default():
            tf.set_random_seed(1)
            yield
    finally:
        entry.uninstall()


def train(
    make: Callable[[], Case], config: GeminiConfig | None, optimizer: str = "momentum",
    sizes: tuple[int, ...] = (8,) * 5,
) -> Run:  # fmt: skip
    """Train with clipping, one step per batch size; fetch loss, logits and the norm of the gradients."""
    run = Run()
    with engine(config):
        case = make()
        method = OPTIMIZERS[optimizer]()
        gradients, variables = zip(*method.compute_gradients(case.loss), strict=True)
        clipped, norm = tf.clip_by_global_norm(gradients, 1.0)
        with tf.control_dependencies(case.extra):
            pairs = list(zip(clipped, variables, strict=True))
            step = method.apply_gradients(pairs, tf.train.get_or_create_global_step())
        with tf.Session() as session:
            session.run(tf.global_variables_initializer())
            _set_weights(session)
            for at, size in enumerate(sizes):
                loss, logits, found, _ = session.run([case.loss, case.logits, norm, step], case.batch(size, at))
                run.losses.append(float(loss))
                run.logits.append(logits)
                run.norms.append(float(found))
            run.variables = session.run({one.name: one for one in tf.global_variables()})
        run.reports = entry.reports()
    return run


def _set_weights(session: tf.Session) -> None:
    random = np.random.RandomState(3)
    for one in tf.trainable_variables():
        value = random.randn(*one.shape.as_list()) * 0.1 + ("gamma" in one.name)
        session.run(one.initializer, {one.initializer.inputs[1]: value.astype(np.float32)})


def assert_equal(alone: Run, twin: Run, but: tuple[str, ...] = ()) -> None:
    """Check losses, norms of gradients, logits, and variables with slots; `but` has gradients that are truly zero."""
    np.testing.assert_allclose(twin.losses, alone.losses, rtol=1e-6)
    np.testing.assert_allclose(twin.norms, alone.norms, rtol=1e-5)
    for one, other in zip(twin.logits, alone.logits, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
    assert twin.variables.keys() == alone.variables.keys()
    for name, value in alone.variables.items():
        if not any(part in name for part in but):
            np.testing.assert_allclose(
                twin.variables[name], value, rtol=0, atol=1e-5 * np.abs(value).max(), err_msg=name
            )
