"""A worker: a process that owns parts of a model and runs them when the controller asks."""
