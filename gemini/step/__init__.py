"""Step: the worker programs of one training step, and delayed weight gradients."""
