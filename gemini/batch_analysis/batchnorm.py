"""Statistics of micro-batches: batch normalization in training, where the user has asked for it.

Statistics of the whole batch couple its samples. By opt-in each micro-batch is normalized by its own, and running
averages are updated a micro-batch at a time, in their order: exactly what a loop over the same micro-batches that
accumulates gradients does.
"""

from __future__ import annotations

from torch import nn

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether a module takes statistics over the batch, as it is now."""
    if not isinstance(module, nn.modules.batchnorm._BatchNorm):
        return False
    return module.training or module.running_mean is None


def can_use_micro_batch_statistics(module: nn.Module) -> bool:
    """Whether a module may take those of each micro-batch instead: it is plain batch normalization."""
    return type(module) in _PLAIN and "forward" not in vars(module) and uses_batch_statistics(module)
