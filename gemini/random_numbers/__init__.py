"""Random numbers of a step in micro-batches: equal to those of the whole batch on one device."""
