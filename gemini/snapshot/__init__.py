"""Snapshots: the Python and tensor state of a model, saved, compared and restored."""
