"""Traced functions: the engine in programs of TensorFlow 2, whose steps are functions instead of sessions.

    import tensorflow as tf      the engine is installed
    x = tf.constant(1.0)         the first eager operation: TensorFlow initialises its runtime
                                 ─→ the servers are ready, this process becomes task 0 of their cluster
    train_step(x)                traced: gradients of tapes are those of a twin (`tapes.py`, `keras_trainer.py`)
                                 called for the first time: twin and untouched graph are compared, without an update

A runtime that is initialised cannot join: its variables would be lost. A program of graphs and sessions does not
initialise it; there the process of the script has a server of its own, see `servers.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from gemini.config.gemini_config import GeminiConfig
from gemini.tensorflow.function_comparison import StepDiffersError, check_steps
from gemini.tensorflow.keras_trainer import patch_trainer, restore_trainer
from gemini.tensorflow.servers import Servers, servers_for
from gemini.tensorflow.tapes import own_gradients, patch_tapes, restore_tapes
from gemini.tensorflow.twin_report import TwinReport

_undo: list[tuple[Any, str, Callable[..., Any]]] = []


def install_functions(config: GeminiConfig, record: Callable[[TwinReport], None]) -> None:
    """Let functions of TensorFlow train as the configuration says; `record` takes the reports of their steps."""
    uninstall_functions()
    servers = servers_for(config)
    _join_on_first_use(servers)
    _patch_calls(servers, config, record)
    patch_tapes(config, record)
    patch_trainer()


def uninstall_functions() -> None:
    """Undo `install_functions`; a runtime that has joined stays."""
    restore_trainer()
    restore_tapes()
    while _undo:
        owner, name, function = _undo.pop()
        setattr(owner, name, function)


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    _undo.append((owner, name, getattr(owner, name)))
    setattr(owner, name, function)


def _patch_calls(servers: Servers, config: GeminiConfig, record: Callable[[TwinReport], None]) -> None:
    """Compare the steps of a function in front of its first run; trace one that differs again, without twins."""
    from tensorflow.python.eager.polymorphic_function.concrete_function import ConcreteFunction
    from tensorflow.python.eager.polymorphic_function.polymorphic_function import Function

    call, call_flat = Function.__call__, ConcreteFunction._call_flat

    @wraps(call)
    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        with servers.explained():
            try:
                return call(self, *args, **kwargs)
            except StepDiffersError:
                self._function_cache.clear()
                with own_gradients():
                    return call(self, *args, **kwargs)

    @wraps(call_flat)
    def call_concrete(self: Any, tensor_inputs: Any, captured_inputs: Any) -> Any:
        check_steps(self.graph, [*tensor_inputs, *captured_inputs], config, record)
        return call_flat(self, tensor_inputs, captured_inputs)

    _replace(Function, "__call__", call_function)
    _replace(ConcreteFunction, "_call_flat", call_concrete)


# ── the eager runtime ──────────────────────────────────────────────────────────────────────────────────────────────
def _join_on_first_use(servers: Servers) -> None:
    """Join the servers, or configure the logical devices, when the eager runtime is first used."""
    from tensorflow.python.eager import context

    initialise = context.Context.ensure_initialized

    def ensure_initialized(self: Any) -> None:
        is_eager = context.default_execution_mode == context.EAGER_MODE
        if not self._initialized and self._is_global_context and is_eager:
            _prepare(self, servers)
        initialise(self)

    _replace(context.Context, "ensure_initialized", ensure_initialized)


def _prepare(runtime: Any, servers: Servers) -> None:
    if servers.is_remote:
        if servers.has_own_server or runtime._server_def is not None:
            return
        servers.wait_until_ready()
        servers.eager_runtime_joins()
        runtime._server_def = _server_def(servers)
        return
    count = servers.devices.cpus()
    cpus = runtime.list_physical_devices("CPU")
    if count > 1 and cpus and runtime.get_logical_device_configuration(cpus[0]) is None:
        from tensorflow.python.eager.context import LogicalDeviceConfiguration

        runtime.set_logical_device_configuration(cpus[0], [LogicalDeviceConfiguration() for _ in range(count)])


def _server_def(servers: Servers) -> Any:
    """Return the description of this process as task 0 of the servers' cluster."""
    import tensorflow.compat.v1 as tf

    cluster = tf.train.ClusterSpec(servers.cluster)
    made = tf.train.ServerDef(
        cluster=cluster.as_cluster_def(), job_name=servers.devices.job, task_index=0, protocol="grpc"
    )
    made.default_session_config.device_count["CPU"] = servers.devices.cpus(0)
    return made
