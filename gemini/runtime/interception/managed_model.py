"""A managed model: the model whose calls are intercepted, with its placement in the workers and its plans."""

from __future__ import annotations

from torch import nn

from gemini.runtime.eager.placed_model import PlacedModel
from gemini.runtime.pipelined.pipelined_model import PipelinedModel
from gemini.runtime.pool.worker_pool import WorkerPool


class ManagedModel(PlacedModel):
    """The state that the controller keeps of one model; it does not refer to the model itself."""

    def __init__(
        self, model: nn.Module, pool: WorkerPool, quiet: bool = False, micro_batches: int = 1, strict: bool = False
    ) -> None:
        super().__init__(model, pool, quiet, micro_batches, strict)
        self.pipelined: PipelinedModel | None = None  # where calls may be deferred and run by a plan
