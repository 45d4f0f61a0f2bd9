"""The zoo: every architecture that the installed transformers knows, found through its own mappings.

One model a model type, of the task class that comes first in `TASKS` (tasks with a loss first).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tests.zoo.inputs import make_inputs
from tests.zoo.shrinking import RECIPES, Recipe, rebuilt, shrink

TASKS = (
    "CAUSAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "MASKED_LM",
    "IMAGE_CLASSIFICATION",
    "SPEECH_SEQ_2_SEQ",
    "CTC",
    "AUDIO_CLASSIFICATION",
    "VIDEO_CLASSIFICATION",
    "SEQUENCE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "MASKED_IMAGE_MODELING",
    "TIME_SERIES_PREDICTION",
    "PRETRAINING",
    "QUESTION_ANSWERING",
    "TOKEN_CLASSIFICATION",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "TEXT_ENCODING",
    "IMAGE",
    "",
)
MAX_PARAMETERS = 30_000_000


@dataclass(frozen=True)
class Species:
    """One architecture: a model type, its task and the class for it."""

    model_type: str
    task: str
    class_name: str


@dataclass
class Specimen:
    """A tiny model of a species with inputs on which a training step works."""

    model: torch.nn.Module
    kwargs: dict[str, Any]
    recipe: Recipe


def species() -> list[Species]:
    """Every model type that has a torch model."""
    from transformers.models.auto import modeling_auto

    found: dict[str, Species] = {}
    for task in TASKS:
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        for model_type, classes in getattr(modeling_auto, name, {}).items():
            first = classes[0] if isinstance(classes, (tuple, list)) else classes
            found.setdefault(model_type, Species(model_type, task or "BASE", first))
    return sorted(found.values(), key=lambda one: one.model_type)


class NotBuildable(Exception):
    """No recipe gives a model that can train a step; says why the last one failed."""


def build(one: Species, batch: int = 4) -> Specimen:
    """A tiny specimen: the first recipe whose model runs one eager training step."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    reasons = []
    cls = getattr(transformers, one.class_name, None)
    if cls is None:
        raise NotBuildable(f"{one.class_name} is not exported")
    for recipe in RECIPES:
        try:
            config = _small_config(CONFIG_MAPPING[one.model_type], recipe)
            with torch.device("meta"):
                size = sum(p.numel() for p in cls(config).parameters())
            if size > MAX_PARAMETERS:
                raise NotBuildable(f"{size / 1e6:.0f} M parameters after shrinking")
            config = _small_config(CONFIG_MAPPING[one.model_type], recipe)
            torch.manual_seed(0)
            model = cls(config).float().train()
            kwargs = make_inputs(model, config, one.task, batch)
            return Specimen(model, kwargs, recipe)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error!s:.160}".replace("\n", " "))
    raise NotBuildable(reasons[0] if len(set(reasons)) == 1 else f"{reasons[0]} | {reasons[-1]}")


def _small_config(cls: Any, recipe: Recipe) -> Any:
    config = shrink(cls(), recipe)
    return shrink(rebuilt(config), recipe) if recipe.rebuild else config
