"""Sharding: the layouts of all values of a model over the shards of a stage, and the collectives they need."""
