"""Simulation of training steps on described clusters, and search for the best configuration."""
