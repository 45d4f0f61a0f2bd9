"""Randomness of a step in micro-batches: the numbers that one device would have drawn for the whole batch."""
