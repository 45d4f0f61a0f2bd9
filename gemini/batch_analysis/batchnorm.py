"""Batch normalization in training with the statistics of each micro-batch, by opt-in.

Statistics of the whole batch couple its samples. By opt-in each micro-batch is normalized by its own, and running
averages are updated once per micro-batch, in order: exactly like a loop over the same micro-batches that accumulates
gradients.
"""

from __future__ import annotations

from torch import nn

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def uses_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module, in its current mode, computes statistics over the batch."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    return module.training or module.running_mean is None


def can_use_micro_batch_statistics(module: nn.Module) -> bool:
    """Return whether a module may use the statistics of each micro-batch: plain batch normalization in training."""
    return type(module) in _PLAIN and "forward" not in vars(module) and uses_batch_statistics(module)
