"""Inputs: a batch for any model, from its task, the signature of its forward and its configuration.

Several guesses are tried; the first on which the model runs a training step (finite loss or outputs, and a
gradient for at least one parameter) is taken.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch

LENGTH = 12


def _sub(config: Any, *names: str) -> Any:
    for name in names:
        if hasattr(config, name) and getattr(config, name) is not None:
            return getattr(config, name)
    return config


def _get(config: Any, name: str, default: Any) -> Any:
    for holder in (config, _sub(config, "text_config"), _sub(config, "vision_config"), _sub(config, "audio_config")):
        value = getattr(holder, name, None)
        if value is not None:
            return value
    return default


def _tokens(config: Any, batch: int, length: int = LENGTH) -> torch.Tensor:
    vocabulary = int(_get(config, "vocab_size", 100))
    special = {
        value
        for holder in (config, _sub(config, "text_config"))
        for name, value in vars(holder).items()
        if name.endswith(("token_id", "token_index", "_id")) and isinstance(value, int)
    }
    allowed = [token for token in range(min(vocabulary, 200)) if token not in special] or [0]
    picks = torch.randint(0, len(allowed), (batch, length))
    return torch.tensor(allowed)[picks]


def _image(config: Any, batch: int, size: int | None = None) -> torch.Tensor:
    vision = _sub(config, "vision_config", "backbone_config", "encoder")
    found = size or getattr(config, "image_size", None) or getattr(vision, "image_size", None) or 64
    height, width = (found[0], found[1]) if isinstance(found, (list, tuple)) else (found, found)
    channels = getattr(config, "num_channels", None) or getattr(vision, "num_channels", None) or 3
    return torch.randn(batch, int(channels), int(height), int(width))


def _labels(task: str, config: Any, batch: int, inputs: dict[str, Any]) -> dict[str, Any]:
    classes = int(getattr(config, "num_labels", 2) or 2)
    tokens = inputs.get("input_ids")
    if task in ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "PRETRAINING") and tokens is not None:
        return {"labels": tokens.clone()}
    if task in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        return {"labels": _tokens(config, batch, 8)}
    if task == "CTC":
        return {"labels": _tokens(config, batch, 3)}
    if task in ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION"):
        return {"labels": torch.randint(0, classes, (batch,))}
    if task == "TOKEN_CLASSIFICATION" and tokens is not None:
        return {"labels": torch.randint(0, classes, tuple(tokens.shape))}
    if task == "SEMANTIC_SEGMENTATION" and "pixel_values" in inputs:
        return {"labels": torch.randint(0, classes, (batch, *inputs["pixel_values"].shape[-2:]))}
    if task == "QUESTION_ANSWERING":
        return {"start_positions": torch.randint(0, 4, (batch,)), "end_positions": torch.randint(4, 8, (batch,))}
    return {}


def _main(name: str, config: Any, batch: int) -> Iterator[dict[str, Any]]:
    """Guesses for the main input."""
    if name in ("pixel_values", "image"):
        frames = int(_get(config, "num_frames", 0) or 0)
        if frames:
            yield {name: torch.randn(batch, frames, *_image(config, 1).shape[1:])}
        yield {name: _image(config, batch)}
        for size in (64, 128, 224):
            yield {name: _image(config, batch, size)}
    elif name in ("pixel_values_videos",):
        frames = int(_get(config, "num_frames", 0) or _get(config, "frames_per_clip", 0) or 4)
        yield {name: torch.randn(batch, frames, *_image(config, 1).shape[1:])}
    elif name == "input_values":
        yield {name: torch.randn(batch, 4000)}
        yield {name: torch.randn(batch, 1, 4000)}
        yield {name: torch.randn(batch, int(_get(config, "max_length", 64)), int(_get(config, "num_mel_bins", 16)))}
        yield {name: torch.randn(batch, 16000)}
    elif name == "input_features":
        bins = int(
            _get(config, "num_mel_bins", 0)
            or _get(config, "feature_size", 0)
            or _get(config, "input_feat_per_channel", 80)
        )
        positions = int(_get(config, "max_source_positions", 32))
        for length in (2 * positions, positions, 64):
            yield {name: torch.randn(batch, bins, length)}
            yield {name: torch.randn(batch, length, bins)}
        yield {name: torch.randn(batch, 64, int(_get(config, "feature_projection_input_dim", 160)))}
    elif name == "inputs_embeds":
        yield {name: torch.randn(batch, LENGTH, int(_get(config, "hidden_size", 32)))}
    elif name == "past_values":
        length = int(_get(config, "context_length", 32) or 32)
        for channels in (int(_get(config, "num_input_channels", 1) or 1), 1):
            yield {name: torch.randn(batch, length, channels)}
            yield {name: torch.randn(batch, length)}


def guesses(model: Any, config: Any, task: str, batch: int) -> Iterator[dict[str, Any]]:
    """Batches the model may accept, the most informative first."""
    accepted = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "input_ids")
    names = [main] if main in accepted else []
    names += [
        name
        for name in ("input_ids", "pixel_values", "input_values", "input_features", "past_values")
        if name in accepted
    ]
    for name in dict.fromkeys(names):
        for base in ({"input_ids": _tokens(config, batch)},) if name == "input_ids" else _main(name, config, batch):
            yield from _with_company(base, accepted, config, task, batch)
    if "input_ids" in accepted and "pixel_values" in accepted:
        both = {"input_ids": _tokens(config, batch), "pixel_values": _image(config, batch)}
        yield from _with_company(both, accepted, config, task, batch)


def _with_company(base: dict[str, Any], accepted: Any, config: Any, task: str, batch: int) -> Iterator[dict[str, Any]]:
    masked = dict(base)
    if "input_ids" in base and "attention_mask" in accepted:
        masked["attention_mask"] = torch.ones_like(base["input_ids"])
    labels = {name: value for name, value in _labels(task, config, batch, base).items() if name in accepted}
    decoder = {"decoder_input_ids": _tokens(config, batch, 8)} if "decoder_input_ids" in accepted else {}
    boxes = (
        {"bbox": torch.zeros(*base["input_ids"].shape, 4, dtype=torch.long)}
        if "bbox" in accepted and "input_ids" in base
        else {}
    )
    uncached = {**masked, "use_cache": False} if "use_cache" in accepted else base
    for extra in (labels, {**labels, **decoder}, decoder, {}):
        for start in (masked, base, uncached):
            yield {**start, **boxes, **extra}


def make_inputs(model: Any, config: Any, task: str, batch: int) -> dict[str, Any]:
    """The first guess on which a training step works."""
    failures: list[str] = []
    for kwargs in guesses(model, config, task, batch):
        try:
            if trains(model, kwargs):
                return kwargs
            failures.append("nothing to differentiate")
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error!s:.200}")
    raise RuntimeError(failures[0] if failures else "no input could be guessed from the signature")


def trains(model: Any, kwargs: dict[str, Any]) -> bool:
    """Whether two eager training steps work: a model that keeps a graph from call to call fails the second."""
    return all(_one_step(model, kwargs) for _ in range(2))


def _one_step(model: Any, kwargs: dict[str, Any]) -> bool:
    from gemini.capture.values import tensors

    torch.manual_seed(0)
    output = model(**kwargs)
    outputs = [tensor for _, tensor in tensors(output) if tensor.requires_grad and tensor.is_floating_point()]
    loss = getattr(output, "loss", None)
    total = loss if isinstance(loss, torch.Tensor) and loss.requires_grad else sum(t.float().mean() for t in outputs)
    if not isinstance(total, torch.Tensor) or not total.requires_grad:
        return False
    total.sum().backward()
    useful = any(p.grad is not None for p in model.parameters())
    model.zero_grad(set_to_none=True)
    return useful and bool(torch.isfinite(total).all())
