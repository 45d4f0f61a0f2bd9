"""The configuration of a run: fields, readers of single values, and modes. Imports no framework."""

from gemini.config.gemini_config import GeminiConfig

__all__ = ["GeminiConfig"]
