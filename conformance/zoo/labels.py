"""Labels: what a task is trained against, for inputs already made."""

from __future__ import annotations

from typing import Any

import torch

from conformance.zoo.makers import About, tokens

_SAME_TOKENS = ("CAUSAL_LM", "MASKED_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM", "PRETRAINING")
_ONE_CLASS = ("IMAGE_CLASSIFICATION", "AUDIO_CLASSIFICATION", "VIDEO_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")


def labels(task: str, about: About) -> dict[str, Any]:
    """The labels of a task by their usual names; none where it is trained without."""
    classes = int(getattr(about.config, "num_labels", 2) or 2)
    given, batch = about.given, about.batch
    words = given.get("input_ids")
    if task in _SAME_TOKENS and words is not None:
        return {"labels": words.clone()}
    if task in ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"):
        return {"labels": tokens(about, 8)}
    if task == "CTC":
        return {"labels": tokens(about, 3)}
    if task in _ONE_CLASS:
        return {"labels": torch.randint(0, classes, (batch,))}
    if task == "TOKEN_CLASSIFICATION" and words is not None:
        return {"labels": torch.randint(0, classes, tuple(words.shape))}
    if task == "SEMANTIC_SEGMENTATION" and "pixel_values" in given:
        return {"labels": torch.randint(0, classes, (batch, *given["pixel_values"].shape[-2:]))}
    if task == "QUESTION_ANSWERING":
        return {"start_positions": torch.randint(0, 4, (batch,)), "end_positions": torch.randint(4, 8, (batch,))}
    return {}
