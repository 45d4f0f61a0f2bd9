"""Estimator: a model function with its loops for training, evaluation and prediction.

    train(input_fn)      graph: input, model_fn(TRAIN)    → steps until the input ends, or `steps`, or `max_steps`
    evaluate(input_fn)   graph: input, model_fn(EVAL)     → the metrics over the input, from the last checkpoint
    predict(input_fn)    graph: input, model_fn(PREDICT)  → one value per example, from the last checkpoint

Every call builds a new graph; what one call leaves to the next are the checkpoints in `model_dir`.
"""

from __future__ import annotations

import copy
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from gemini.tensorflow.compat.estimator_spec import EstimatorSpec, ModeKeys, TPUEstimatorSpec, WarmStartSettings
from gemini.tensorflow.compat.lazy_names import tf
from gemini.tensorflow.compat.run_config import RunConfig

_Function = Callable[..., Any]
_LOSS, _STEP = "loss", "global_step"


class Estimator:
    """Trains and evaluates what `model_fn(features, labels, mode, params, config)` returns."""

    def __init__(
        self,
        model_fn: _Function,
        model_dir: str | None = None,
        config: Any = None,
        params: Any = None,
        warm_start_from: Any = None,
    ) -> None:
        if params is not None and not hasattr(params, "keys") and not hasattr(params, "values"):
            raise ValueError(f"params is expected to be a dictionary, given {type(params)}")
        config = RunConfig() if config is None else config
        if model_dir and config.model_dir and model_dir != config.model_dir:
            raise ValueError(f"model_dir is {model_dir!r}, but that of the RunConfig is {config.model_dir!r}")
        chosen = model_dir or config.model_dir
        if chosen is None:
            chosen = tempfile.mkdtemp()
            tf.logging.warning("Using temporary folder as model directory: %s", chosen)
        self._config = config.replace(model_dir=os.fspath(chosen))
        self._params = params
        self._model_fn = model_fn
        self._warm_start = _warm_start(warm_start_from)
        tf.logging.info("Using config: %s", self._config)

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints and summaries."""
        return str(self._config.model_dir)

    @property
    def config(self) -> Any:
        """The run configuration."""
        return copy.copy(self._config)

    @property
    def params(self) -> Any:
        """A copy of the hyper-parameters."""
        return copy.deepcopy({} if self._params is None else self._params)

    @property
    def model_fn(self) -> _Function:
        """The model function."""
        return self._model_fn

    def latest_checkpoint(self) -> str | None:
        """Return the path of the last checkpoint."""
        found = tf.train.latest_checkpoint(self.model_dir)
        return None if found is None else str(found)

    def get_variable_names(self) -> list[str]:
        """Return the names of all variables in the last checkpoint."""
        return [name for name, _ in tf.train.list_variables(self.model_dir)]

    def get_variable_value(self, name: str) -> Any:
        """Return the value of a variable in the last checkpoint."""
        return tf.train.load_variable(self.model_dir, name)

    # ── training ───────────────────────────────────────────────────────────────────────────────────────────────────
    def train(
        self,
        input_fn: _Function,
        hooks: Sequence[Any] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Sequence[Any] | None = None,
    ) -> Estimator:
        """Train for `steps` more steps, up to `max_steps` in all, or until the input ends; return the estimator."""
        if steps is not None and max_steps is not None:
            raise ValueError("Can not provide both steps and max_steps.")
        for name, value in (("steps", steps), ("max_steps", max_steps)):
            if value is not None and value <= 0:
                raise ValueError(f"Must specify {name} > 0, given: {value}")
        if max_steps is not None and self._trained_steps() >= max_steps:
            tf.logging.info("Skipping training since max_steps has already saved.")
            return self
        with tf.Graph().as_default() as graph:
            spec = self._build(graph, input_fn, ModeKeys.TRAIN)
            if self._warm_start is not None and self.latest_checkpoint() is None:
                _start_from(self._warm_start)
            if not any(one.op.name == _LOSS for one in graph.get_collection(tf.GraphKeys.SUMMARIES)):
                tf.summary.scalar(_LOSS, spec.loss)
            loss = self._run_training(spec, self._training_hooks(spec, hooks, steps, max_steps), saving_listeners)
        tf.logging.info("Loss for final step: %s.", loss)
        return self

    def _trained_steps(self) -> int:
        if self.latest_checkpoint() is None:
            return 0
        return int(tf.train.load_variable(self.model_dir, tf.GraphKeys.GLOBAL_STEP))

    def _training_hooks(
        self, spec: EstimatorSpec, hooks: Sequence[Any] | None, steps: int | None, max_steps: int | None
    ) -> list[Any]:
        made = [*(hooks or ())]
        if steps is not None or max_steps is not None:
            made.append(tf.train.StopAtStepHook(steps, max_steps))
        made.append(tf.train.NanTensorHook(spec.loss))
        every = self._config.log_step_count_steps
        if every:
            shown = {_LOSS: spec.loss, "step": tf.train.get_global_step()}
            made.append(tf.train.LoggingTensorHook(shown, every_n_iter=every))
        return [*made, *(spec.training_hooks or ()), *(spec.training_chief_hooks or ())]

    def _run_training(self, spec: EstimatorSpec, hooks: list[Any], listeners: Sequence[Any] | None) -> Any:
        config = self._config
        scaffold = self._scaffold(spec)
        if config.save_checkpoints_steps or config.save_checkpoints_secs:
            hooks.append(
                tf.train.CheckpointSaverHook(
                    self.model_dir,
                    save_secs=config.save_checkpoints_secs,
                    save_steps=config.save_checkpoints_steps,
                    scaffold=scaffold,
                    listeners=list(listeners or ()),
                )
            )
        elif listeners:
            raise ValueError("saving_listeners need checkpoints: set save_checkpoints_steps in the RunConfig")
        loss = None
        with tf.train.MonitoredTrainingSession(
            checkpoint_dir=self.model_dir,
            scaffold=scaffold,
            hooks=hooks,
            save_checkpoint_secs=0,
            save_summaries_steps=config.save_summary_steps,
            save_summaries_secs=None,
            config=config.session_config,
            log_step_count_steps=config.log_step_count_steps,
        ) as session:
            while not session.should_stop():
                _, loss = session.run([spec.train_op, spec.loss])
        return loss

    def _scaffold(self, spec: EstimatorSpec) -> Any:
        scaffold = spec.scaffold or tf.train.Scaffold()
        if not (scaffold.saver or tf.get_collection(tf.GraphKeys.SAVERS)):
            saver = tf.train.Saver(
                max_to_keep=self._config.keep_checkpoint_max,
                keep_checkpoint_every_n_hours=self._config.keep_checkpoint_every_n_hours,
                defer_build=True,
                save_relative_paths=True,
            )
            tf.add_to_collection(tf.GraphKeys.SAVERS, saver)
        return scaffold

    # ── evaluation ─────────────────────────────────────────────────────────────────────────────────────────────────
    def evaluate(
        self,
        input_fn: _Function,
        steps: int | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Return the metrics over `steps` batches, or over the whole input, with the loss and the global step."""
        if steps is not None and steps <= 0:
            raise ValueError(f"Must specify steps > 0, given: {steps}")
        path = checkpoint_path or self.latest_checkpoint()
        if path is None:
            raise ValueError(f"Could not find trained model in model_dir: {self.model_dir}.")
        with tf.Graph().as_default() as graph:
            spec = self._build(graph, input_fn, ModeKeys.EVAL)
            metrics = dict(spec.eval_metric_ops or {})
            if _LOSS in metrics:
                raise ValueError('Metric with name "loss" is not allowed, because Estimator adds it itself')
            metrics[_LOSS] = tf.metrics.mean(spec.loss)
            update = tf.group(*(one for _, one in metrics.values()))
            final = tf.train.FinalOpsHook(
                {**{key: value for key, (value, _) in metrics.items()}, _STEP: tf.train.get_global_step()}
            )
            creator = tf.train.ChiefSessionCreator(
                self._scaffold(spec), config=self._config.session_config, checkpoint_filename_with_path=path
            )
            every = [final, *(hooks or ()), *(spec.evaluation_hooks or ())]
            with tf.train.MonitoredSession(creator, every) as session:
                done = 0
                while not session.should_stop() and (steps is None or done < steps):
                    session.run(update)
                    done += 1
            values = final.final_ops_values
        self._write_evaluation(values, name)
        return dict(sorted(values.items()))

    def _write_evaluation(self, values: dict[str, Any], name: str | None) -> None:
        shown = ", ".join(f"{key} = {value}" for key, value in sorted(values.items()))
        tf.logging.info("Saving dict for global step %d: %s", values[_STEP], shown)
        folder = os.path.join(self.model_dir, f"eval_{name}" if name else "eval")
        numbers = {key: value for key, value in values.items() if key != _STEP and getattr(value, "ndim", 0) == 0}
        summary = tf.Summary(
            value=[tf.Summary.Value(tag=key, simple_value=float(value)) for key, value in numbers.items()]
        )
        with tf.Graph().as_default():  # writers belong to a graph, not to eager execution
            writer = tf.summary.FileWriter(folder)
            writer.add_summary(summary, int(values[_STEP]))
            writer.close()

    # ── prediction ─────────────────────────────────────────────────────────────────────────────────────────────────
    def predict(
        self,
        input_fn: _Function,
        predict_keys: Sequence[str] | str | None = None,
        hooks: Sequence[Any] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yield the predictions: for each example, or for each batch."""
        path = checkpoint_path or self.latest_checkpoint()
        if path is None:
            tf.logging.info("Could not find trained model in model_dir: %s, running initialization.", self.model_dir)
        with tf.Graph().as_default() as graph:
            spec = self._build(graph, input_fn, ModeKeys.PREDICT)
            predictions = _chosen(spec.predictions, predict_keys)
            creator = tf.train.ChiefSessionCreator(
                self._scaffold(spec), config=self._config.session_config, checkpoint_filename_with_path=path
            )
            with tf.train.MonitoredSession(creator, [*(hooks or ()), *(spec.prediction_hooks or ())]) as session:
                while not session.should_stop():
                    batch = session.run(predictions)
                    if not yield_single_examples:
                        yield batch
                    elif isinstance(batch, dict):
                        for at in range(_batch_size(batch)):
                            yield {key: value[at] for key, value in batch.items()}
                    else:
                        yield from batch

    # ── graphs ─────────────────────────────────────────────────────────────────────────────────────────────────────
    def _build(self, graph: Any, input_fn: _Function, mode: str) -> EstimatorSpec:
        tf.set_random_seed(self._config.tf_random_seed)
        tf.train.get_or_create_global_step(graph)
        features, labels = _features_and_labels(self._call_input(input_fn, mode))
        if mode == ModeKeys.PREDICT:
            labels = None
        tf.logging.info("Calling model_fn.")
        spec = self._call_model(features, labels, mode)
        tf.logging.info("Done calling model_fn.")
        return spec

    def _mode_params(self, mode: str) -> Any:
        """Return the hyper-parameters in a mode."""
        del mode
        return self.params

    def _call_input(self, input_fn: _Function, mode: str) -> Any:
        offered = {"mode": mode, "params": self._mode_params(mode), "config": self.config}
        return input_fn(**_accepted(input_fn, offered))

    def _call_model(self, features: Any, labels: Any, mode: str) -> EstimatorSpec:
        offered = {"labels": labels, "mode": mode, "params": self._mode_params(mode), "config": self.config}
        accepted = _accepted(self._model_fn, offered)
        if labels is not None and "labels" not in accepted:
            raise ValueError("model_fn does not take labels, but input_fn returns labels.")
        result = self._model_fn(features, **accepted)
        if isinstance(result, TPUEstimatorSpec):
            result = result.as_estimator_spec()
        if not isinstance(result, EstimatorSpec):
            raise ValueError("model_fn should return an EstimatorSpec.")
        return result


def _accepted(function: _Function, offered: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that a function takes by name."""
    parameters = inspect.signature(function).parameters
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    return {name: value for name, value in offered.items() if takes_any or name in parameters}


def _features_and_labels(given: Any) -> tuple[Any, Any]:
    """Return the tensors of an input function's result: a data set, features, or features and labels."""
    if hasattr(given, "element_spec") and hasattr(given, "batch"):
        iterator = tf.data.make_initializable_iterator(given)
        tf.add_to_collection(tf.GraphKeys.TABLE_INITIALIZERS, iterator.initializer)
        given = iterator.get_next()
    if isinstance(given, (list, tuple)):
        if len(given) != 2:
            raise ValueError(f"input_fn should return (features, labels) or features, given {len(given)} values")
        return given[0], given[1]
    return given, None


def _chosen(predictions: Any, keys: Sequence[str] | str | None) -> Any:
    if keys is None:
        return predictions
    if not isinstance(predictions, dict):
        raise ValueError("predict_keys argument is not valid in case of non-dict predictions.")
    wanted = [keys] if isinstance(keys, str) else list(keys)
    found = {key: value for key, value in predictions.items() if key in wanted}
    if not found:
        raise ValueError(f"Expected to run at least one output from {list(predictions)}, provided {wanted}.")
    return found


def _batch_size(batch: dict[str, Any]) -> int:
    sizes = {key: value.shape[0] for key, value in batch.items()}
    if len(set(sizes.values())) != 1:
        raise ValueError(f"Batch length of predictions should be same: {sizes}")
    return int(next(iter(sizes.values())))


def _warm_start(given: Any) -> WarmStartSettings | None:
    if given is None or isinstance(given, WarmStartSettings):
        return given
    return WarmStartSettings(os.fspath(given))


def _start_from(settings: WarmStartSettings) -> None:
    tf.train.warm_start(
        settings.ckpt_to_initialize_from,
        settings.vars_to_warm_start,
        settings.var_name_to_vocab_info,
        settings.var_name_to_prev_var_name,
    )
