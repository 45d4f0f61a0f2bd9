"""The zoo: every architecture that the installed transformers knows, found through its own mappings.

One model a model type, of the task class that comes first in `TASKS` (tasks with a loss first).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from conformance.zoo.backbones import default_config
from conformance.zoo.inputs import make_inputs
from conformance.zoo.makers import About
from conformance.zoo.recipes import FOR_PICTURES, RECIPES, Recipe
from conformance.zoo.small_configs import expected, rebuilt, shrink

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
_OF_PICTURES = (
    "IMAGE_CLASSIFICATION",
    "SEMANTIC_SEGMENTATION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "MASKED_IMAGE_MODELING",
    "VIDEO_CLASSIFICATION",
    "IMAGE",
    "BASE",
)
MAX_PARAMETERS = 30_000_000
MAX_ADDED = 6
MISSING_LIBRARY = (ImportError,)
_WANTED = re.compile(r"`(\w+)=True`")
_ABSENT = re.compile(r"'(\w+Config)' object has no attribute '(\w+)'")


@dataclass(frozen=True)
class Species:
    """One architecture: a model type, its task and the class for it; then its classes for other tasks."""

    model_type: str
    task: str
    class_name: str
    others: tuple[tuple[str, str], ...] = ()


Hint = tuple[str, int, bool]  # class, number of the recipe, whether other than main inputs were needed


@dataclass
class Specimen:
    """A tiny model of a species with inputs on which a training step works, and how it was found."""

    model: torch.nn.Module
    kwargs: dict[str, Any]
    recipe: Recipe
    hint: Hint


def species() -> list[Species]:
    """Every model type that has a torch model."""
    from transformers.models.auto import modeling_auto

    found: dict[str, dict[str, str]] = {}
    for task in TASKS:
        name = f"MODEL_FOR_{task}_MAPPING_NAMES" if task else "MODEL_MAPPING_NAMES"
        for model_type, classes in getattr(modeling_auto, name, {}).items():
            first = classes[0] if isinstance(classes, (tuple, list)) else classes
            found.setdefault(model_type, {}).setdefault(first, task or "BASE")
    made = []
    for model_type, tasks in sorted(found.items()):
        (cls, task), *others = tasks.items()
        made.append(Species(model_type, task, cls, tuple((task, cls) for cls, task in others)))
    return made


class NotBuildable(Exception):
    """No recipe gives a model that can train a step; says why the last one failed."""


def build(one: Species, batch: int = 4, hint: Hint | None = None) -> Specimen:
    """A tiny specimen: the first recipe whose model runs two eager training steps, of the first task that can.

    A `hint`, of a specimen found before, is tried first; it saves time and decides nothing.
    """
    reasons: list[str] = []
    lacking: set[str] = set()  # classes that need a library which is not there
    for task, class_name, thorough, recipe in _ways(one, hint):
        if class_name not in lacking:
            try:
                return _specimen(one.model_type, task, class_name, recipe, batch=batch, thorough=thorough)
            except MISSING_LIBRARY as error:
                reasons.append(_short(error))
                lacking.add(class_name)
            except Exception as error:
                reasons.append(_short(error))
    raise NotBuildable(reasons[0] if len(set(reasons)) == 1 else f"{reasons[0]} | {reasons[-1]}")


def _ways(one: Species, hint: Hint | None) -> Iterator[tuple[str, str, bool, Recipe]]:
    """Task, class, thoroughness and recipe, in the order to try them."""
    classes = ((one.task, one.class_name), *one.others)
    if hint is not None and hint[1] < len(RECIPES):
        yield from ((task, name, hint[2], RECIPES[hint[1]]) for task, name in classes if name == hint[0])
    for task, class_name in classes:
        recipes = FOR_PICTURES if task in _OF_PICTURES else RECIPES
        for thorough in (False, True):
            yield from ((task, class_name, thorough, recipe) for recipe in recipes)


def _specimen(model_type: str, task: str, class_name: str, recipe: Recipe, *, batch: int, thorough: bool) -> Specimen:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = getattr(transformers, class_name, None)
    if cls is None:
        raise NotBuildable(f"{class_name} is not exported")
    if cls.forward is torch.nn.Module.forward:
        raise NotBuildable(f"{class_name} has no forward of its own")
    config_class = getattr(cls, "config_class", None) or CONFIG_MAPPING[model_type]
    added: dict[tuple[str, str], Any] = {}
    for _ in range(MAX_ADDED):
        try:
            config, model = _model(cls, config_class, recipe, added)
            inputs = make_inputs(model, config, task, batch, thorough=thorough)
            return Specimen(model, inputs, recipe, (class_name, RECIPES.index(recipe), thorough))
        except Exception as error:
            missing, wanted = _ABSENT.search(str(error)), _WANTED.search(str(error))
            if missing is not None and missing.groups() not in added:
                added[missing.group(1), missing.group(2)] = expected(missing.group(2), recipe)
            elif wanted is not None and (config_class.__name__, wanted.group(1)) not in added:
                added[config_class.__name__, wanted.group(1)] = True
            else:
                raise
    raise NotBuildable(f"its configuration lacks {', '.join(name for _, name in added)}")


def _model(cls: Any, config_class: Any, recipe: Recipe, added: dict[tuple[str, str], Any]) -> tuple[Any, Any]:
    with torch.device("meta"):
        size = sum(p.numel() for p in cls(small_config(config_class, recipe, added)).parameters())
    if size > MAX_PARAMETERS:
        raise NotBuildable(f"{size / 1e6:.0f} M parameters after shrinking")
    config = small_config(config_class, recipe, added)
    torch.manual_seed(0)
    return config, cls(config).float().train()


def small_config(cls: Any, recipe: Recipe, added: dict[tuple[str, str], Any] | None = None) -> Any:
    """A small configuration of a class, with fields added that its architecture reads and that it does not have."""
    config = shrink(default_config(cls), recipe)
    if recipe.rebuild:
        config = shrink(rebuilt(config), recipe)
    for (holder, name), value in (added or {}).items():
        for one in About(config, 1).holders():
            if type(one).__name__ == holder:
                setattr(one, name, value)
    return config


def _short(error: Exception) -> str:
    library = re.search(r"requires the (\w+) library", str(error))
    if library is not None:
        return f"needs the library {library.group(1)}"
    if "couldn't connect to" in str(error):
        return "needs a download"
    return f"{type(error).__name__}: {error!s:.160}".replace("\n", " ")
