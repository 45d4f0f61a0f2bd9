"""Ordinary training scripts, run under `python` and under `gemini_python`, and compared."""
