"""TensorBoard scalars: time per step, loss and path of the calls of a run."""

from __future__ import annotations

from pathlib import Path

from gemini.errors import MissingEngineError
from gemini.report.journal_reader import read_run
from gemini.runtime.call_outcome import CallPath


def write_scalars(folder: Path, target: Path) -> int:
    """Write the history of the last run as TensorBoard events; return the number of scalars."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingEngineError("tensorboard", "tensorboard", "writing TensorBoard scalars") from error
    count = 0
    with SummaryWriter(str(target)) as writer:
        for model in read_run(folder).models:
            history = model.history
            for at, bucket in enumerate(history.buckets):
                calls = sum(bucket.counts.values())
                overlapped = sum(
                    many for kind, many in bucket.counts.items() if history.kinds[kind][0] == CallPath.OVERLAPPED.value
                )
                scalars = {"overlapped share": overlapped / calls if calls else 0.0}
                if bucket.timed:
                    scalars["step ms"] = bucket.total_ms / bucket.timed
                if bucket.loss is not None:
                    scalars["loss"] = bucket.loss
                for name, value in scalars.items():
                    writer.add_scalar(f"{model.model}/{name}", value, at * history.size)
                count += len(scalars)
    return count
