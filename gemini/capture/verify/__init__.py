"""Verification of a captured graph: model and graph compared on one training step."""
