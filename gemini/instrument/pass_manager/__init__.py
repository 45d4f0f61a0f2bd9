"""Passes found, put in order, run over a file, and verified."""
