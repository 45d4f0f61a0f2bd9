"""Random numbers of a step in micro-batches: those that one device would draw for the whole batch."""
