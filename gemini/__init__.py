"""Gemini: train models too big or too slow for one device without touching their code."""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from gemini.compiler import GeminiCompiler, compile, pipe_model
    from gemini.config.gemini_config import GeminiConfig
    from gemini.config.modes import Mode, auto, hybrid, pipeline, sharding, sharding_and_pipeline

__version__ = "0.1.0"

__all__ = [
    "GeminiCompiler",
    "GeminiConfig",
    "Mode",
    "auto",
    "compile",
    "hybrid",
    "pipe_model",
    "pipeline",
    "sharding",
    "sharding_and_pipeline",
]

_MODULES = {
    "GeminiCompiler": "gemini.compiler",
    "GeminiConfig": "gemini.config.gemini_config",
    "compile": "gemini.compiler",
    "pipe_model": "gemini.compiler",
}


def __getattr__(name: str) -> object:
    """Import a public name on first access, so that a script pays only for what it uses."""
    if name not in __all__:
        raise AttributeError(f"module 'gemini' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_MODULES.get(name, "gemini.config.modes")), name)
    globals()[name] = value
    return value
