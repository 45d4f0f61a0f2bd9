"""Parallelism modes: the values of `GeminiConfig(mode=…)`, importable by name."""

from __future__ import annotations

from enum import Enum


class Mode(str, Enum):
    """A kind of model parallelism. Members are strings, so `"pipeline"` and `pipeline` are equal."""

    AUTO = "auto"
    SHARDING = "sharding"
    PIPELINE = "pipeline"
    SHARDING_AND_PIPELINE = "sharding_and_pipeline"

    def __str__(self) -> str:
        return self.value

    @property
    def shards(self) -> bool:
        """Whether this mode may split operators over several devices."""
        return self is not Mode.PIPELINE

    @property
    def pipelines(self) -> bool:
        """Whether this mode may cut the model into stages."""
        return self is not Mode.SHARDING


auto = Mode.AUTO
sharding = Mode.SHARDING
pipeline = Mode.PIPELINE
sharding_and_pipeline = Mode.SHARDING_AND_PIPELINE
hybrid = Mode.SHARDING_AND_PIPELINE

SPELLINGS: dict[str, Mode] = {**{mode.value: mode for mode in Mode}, "hybrid": hybrid}
