"""Run configurations of estimators: tf.estimator.RunConfig, and that of TPU scripts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

_OPEN: Any = object()  # neither seconds nor steps are given


class InputPipelineConfig:
    """How a TPU's input is fed; without TPUs there is one pipeline."""

    PER_SHARD_V1, PER_HOST_V1, PER_HOST_V2, BROADCAST, SLICED = 1, 2, 3, 4, 5


@dataclass(frozen=True)
class TPUConfig:
    """Settings of TPUs; they apply on TPUs only, as in TensorFlow 1."""

    iterations_per_loop: int = 2
    num_shards: int | None = None
    num_cores_per_replica: int | None = None
    per_host_input_for_training: Any = True
    tpu_job_name: str | None = None
    initial_infeed_sleep_secs: int | None = None
    input_partition_dims: Any = None
    eval_training_input_configuration: int = 2
    experimental_host_call_every_n_steps: int = 1


@dataclass(frozen=True)
class RunConfig:
    """Where an estimator keeps its model, and how often it saves and logs."""

    model_dir: str | None = None
    tf_random_seed: int | None = 1
    save_summary_steps: int | None = 100
    save_checkpoints_steps: Any = _OPEN
    save_checkpoints_secs: Any = _OPEN
    session_config: Any = None
    keep_checkpoint_max: int | None = 5
    keep_checkpoint_every_n_hours: float = 10000
    log_step_count_steps: int | None = 100
    train_distribute: Any = None
    device_fn: Any = None
    protocol: str | None = None
    eval_distribute: Any = None
    experimental_distribute: Any = None

    def __post_init__(self) -> None:
        steps, seconds = self.save_checkpoints_steps, self.save_checkpoints_secs
        if steps is _OPEN and seconds is _OPEN:
            steps, seconds = None, 600
        steps, seconds = (None if value is _OPEN else value for value in (steps, seconds))
        if steps is not None and seconds is not None:
            raise ValueError("Can not provide both save_checkpoints_steps and save_checkpoints_secs.")
        object.__setattr__(self, "save_checkpoints_steps", steps)
        object.__setattr__(self, "save_checkpoints_secs", seconds)
        for name in ("train_distribute", "eval_distribute", "experimental_distribute", "protocol"):
            if getattr(self, name) is not None:
                raise NotImplementedError(
                    f"RunConfig({name}={getattr(self, name)!r}): the compatibility layer's estimator trains in one "
                    "process\n    → leave it out, and run the script with gemini_python --mode pipeline"
                )

    is_chief = True
    task_id = 0
    task_type = "worker"
    num_worker_replicas = 1
    num_ps_replicas = 0
    global_id_in_cluster = 0
    master = ""
    evaluation_master = ""

    def replace(self, **values: Any) -> Any:
        """Return a copy with other values."""
        if "save_checkpoints_steps" in values:
            values.setdefault("save_checkpoints_secs", None)
        elif "save_checkpoints_secs" in values:
            values.setdefault("save_checkpoints_steps", None)
        return replace(self, **values)


@dataclass(frozen=True)
class TPURunConfig(RunConfig):
    """The configuration of a TPUEstimator; a `master` or a `cluster` is that of a TPU, which is refused."""

    tpu_config: TPUConfig = field(default_factory=TPUConfig)
    master: str | None = None  # type: ignore[assignment]
    evaluation_master: str | None = None  # type: ignore[assignment]
    cluster: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("master", "evaluation_master", "cluster"):
            if getattr(self, name):
                raise NotImplementedError(
                    f"RunConfig({name}={getattr(self, name)!r}): the compatibility layer has no remote masters\n"
                    "    → leave it out, and run the script with gemini_python --mode pipeline"
                )
