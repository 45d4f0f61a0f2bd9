"""Capture options: known facts about the captured call, and how finely the model is opened."""

from __future__ import annotations

from dataclasses import dataclass

from gemini.capture.batch_dim import BatchLayout


@dataclass(frozen=True)
class CaptureOptions:
    """Options of one capture.

    `batch`: the sample dimensions of the inputs; None: found by experiment. A few samples may not show them.
    `repeats`: where the call is one micro-batch, the number of copies of it that make up the batch it is compared with
    (`gemini.capture.sample_loops`); 0: loops over samples are not searched for.
    `opens_leaves`: modules without children are opened, except layers of torch.nn, and activation checkpoints.
    """

    batch: BatchLayout | None = None
    repeats: int = 0
    opens_leaves: bool = False

    def sample_dims(self) -> list[tuple[int | None, int]]:
        """Return the known sample dimension and factor of each input; empty where they are unknown."""
        return [] if self.batch is None else self.batch.sample_dims()


DEFAULT_OPTIONS = CaptureOptions()
