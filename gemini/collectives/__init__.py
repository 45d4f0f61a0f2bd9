"""Collectives: what the shards of a stage exchange, behind one interface."""
