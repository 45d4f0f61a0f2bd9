"""Pipe: a model cut into stages, from one call, and the object that holds and runs them."""

from gemini.pipe.entry import pipe_model
from gemini.pipe.piped_model import Piped

__all__ = ["Piped", "pipe_model"]
