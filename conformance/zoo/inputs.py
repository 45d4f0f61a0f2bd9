"""Inputs: a batch for any model, from its task, the signature of its forward and its configuration.

Several guesses are tried; a guess that fails is completed by what the error says is missing (see repairs.py). The
first on which the model runs two training steps (finite loss or outputs, and a gradient for at least one parameter)
is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from typing import Any

import torch

from conformance.zoo.labels import labels
from conformance.zoo.makers import About, make, patches
from conformance.zoo.repairs import repaired

MAINS = (
    "input_ids",
    "pixel_values",
    "input_values",
    "input_features",
    "past_values",
    "pixel_values_videos",
    "hidden_states",
    "inputs_embeds",
)
TRIES = 20  # of completing one guess
MOST_ARGUMENTS = 10
SEEDS = (0, 1, 11)
CHOICES = 3  # of values for arguments that must be given
SAME_FAILURE = 4


def guesses(model: Any, config: Any, task: str, batch: int, *, thorough: bool) -> Iterator[Iterator[dict[str, Any]]]:
    """Batches the model may accept, the most informative first, grouped by their main input."""
    accepted = inspect.signature(model.forward).parameters
    required = [
        name
        for name, one in accepted.items()
        if one.default is inspect.Parameter.empty and one.kind is one.POSITIONAL_OR_KEYWORD
    ]
    main = getattr(model, "main_input_name", "input_ids")
    mains = list(main) if isinstance(main, (list, tuple)) else [main]
    required += mains[1:]
    names = [name for name in dict.fromkeys([*mains[:1], *MAINS]) if name in accepted] or required[:1]
    names = [name for name in names if name in required] + [name for name in names if name not in required]
    yield from _with_pictures(model, config, task, batch)
    for name in names if thorough else names[:1]:
        for value in make(name, About(config, batch)):
            for base in _with_required({name: value}, required, config, batch):
                yield _with_company(base, accepted, config, task, batch)
    if thorough and "input_ids" in accepted and "pixel_values" in accepted:
        about = About(config, batch)
        both = {"input_ids": next(make("input_ids", about)), "pixel_values": next(make("pixel_values", about))}
        yield _with_company(both, accepted, config, task, batch)


def _with_pictures(model: Any, config: Any, task: str, batch: int) -> Iterator[Iterator[dict[str, Any]]]:
    """Text and pictures together, for models that put pictures in the place of a token."""
    accepted, about = inspect.signature(model.forward).parameters, About(config, batch)
    token = about.get("image_token_id", "image_token_index")
    if token is None or not {"input_ids", "pixel_values"} <= set(accepted):
        return
    words = next(make("input_ids", about))
    grid = next((name for name in accepted if name.startswith("image_grid")), None)
    if grid is None:
        base = {"input_ids": words, "pixel_values": next(make("pixel_values", about))}
    else:
        base = {"input_ids": words, "pixel_values": next(patches(about)), grid: next(make(grid, about))}
    yield islice(_with_company(base, accepted, config, task, batch), 1)


def _with_required(base: dict[str, Any], required: list[str], config: Any, batch: int) -> Iterator[dict[str, Any]]:
    """With the other arguments that must be given: the first candidates of all, then the second …"""
    seen: set[tuple[tuple[int, ...], ...]] = set()
    for choice in range(CHOICES):
        made = dict(base)
        for name in required:
            candidates = list(islice(make(name, About(config, batch, made)), CHOICES)) if name not in made else []
            if candidates:
                made[name] = candidates[min(choice, len(candidates) - 1)]
        shapes = tuple(tuple(getattr(value, "shape", ())) for value in made.values())
        if shapes not in seen:
            seen.add(shapes)
            yield made


def _with_company(base: dict[str, Any], accepted: Any, config: Any, task: str, batch: int) -> Iterator[dict[str, Any]]:
    about = About(config, batch, base)
    masked = dict(base)
    if "input_ids" in base and "attention_mask" in accepted:
        masked["attention_mask"] = torch.ones_like(base["input_ids"])
    wanted = {name: value for name, value in labels(task, about).items() if name in accepted}
    decoder = {"decoder_input_ids": next(make("decoder_input_ids", about))} if "decoder_input_ids" in accepted else {}
    boxes = {"bbox": next(make("bbox", about))} if "bbox" in accepted and "input_ids" in base else {}
    uncached = {**masked, "use_cache": False} if "use_cache" in accepted else base
    combinations = [
        {**start, **boxes, **extra}
        for extra in (wanted, {**wanted, **decoder}, decoder, {})
        for start in (masked, base, uncached)
    ]
    yield from {frozenset(one): one for one in combinations}.values()  # the same names are the same values here


def make_inputs(model: Any, config: Any, task: str, batch: int, *, thorough: bool = True) -> dict[str, Any]:
    """The first guess on which a training step works; unless `thorough`, of those for its main input."""
    failures: list[str] = []
    for group in guesses(model, config, task, batch, thorough=thorough):
        alike: dict[str, int] = {}
        for kwargs in group:
            try:
                return _completed(model, config, kwargs, batch, [TRIES])
            except Exception as error:
                line = f"{type(error).__name__}: {error!s:.200}"
                failures.append(line)
                alike[line] = alike.get(line, 0) + 1
                if alike[line] >= SAME_FAILURE:
                    break  # other company does not help this main input
    raise RuntimeError(_telling(failures) if failures else "no input could be guessed from the signature")


def _telling(failures: list[str]) -> str:
    """The first failure that is not about a missing argument; else the first."""
    return next((line for line in failures if "missing" not in line and "specify" not in line), failures[0])


def _completed(model: Any, config: Any, kwargs: dict[str, Any], batch: int, tries: list[int]) -> dict[str, Any]:
    """The guess, completed by what errors ask for, once it trains; raises its first error otherwise."""
    tries[0] -= 1
    try:
        if trains(model, kwargs):
            return kwargs
        raise RuntimeError("nothing to differentiate")
    except Exception as error:
        if len(kwargs) <= MOST_ARGUMENTS:
            for better in repaired(model, kwargs, error, About(config, batch, kwargs)):
                if tries[0] <= 0:
                    break
                with suppress(Exception):
                    return _completed(model, config, better, batch, tries)
        raise


def trains(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether eager training steps work, one after another: a model may keep a graph, or fail by chance."""
    return all(_one_step(model, kwargs, seed) for seed in SEEDS)


def _one_step(model: Any, kwargs: dict[str, Any], seed: int) -> bool:
    from gemini.ir.encode import tensors

    torch.manual_seed(seed)
    output = model(**kwargs)
    outputs = [t for _, t in tensors(output) if t.requires_grad and t.is_floating_point() and bool(t.isfinite().all())]
    loss = getattr(output, "loss", None)
    total = loss if isinstance(loss, torch.Tensor) and loss.requires_grad else sum(t.float().mean() for t in outputs)
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return False
    total.sum().backward()
    useful = any(p.grad is not None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    return useful and bool(torch.isfinite(total).all())
