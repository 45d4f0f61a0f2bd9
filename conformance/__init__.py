"""Conformance sweeps: models and scripts that nobody here wrote, run in parallel and compared with one device."""
