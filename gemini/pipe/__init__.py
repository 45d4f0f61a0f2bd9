"""Pipe: a model cut into live stages, its files, and the guards that decide per call whether the stages apply."""

from gemini.pipe.piped_model import Piped

__all__ = ["Piped"]
