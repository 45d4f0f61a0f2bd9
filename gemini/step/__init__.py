"""Step: one training step as data: the programs of the workers, and weight gradients computed apart."""
