"""Parallel program: the folder that `gemini compile` writes, and the plans and stages that a run takes from it."""
