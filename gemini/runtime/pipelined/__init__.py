"""Pipelined steps: deferred calls of a model run in the workers by a plan, their micro-batches overlapping."""
