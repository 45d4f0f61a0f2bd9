"""Rules: what an op makes of tensors that vary with the batch, in tables by category."""
