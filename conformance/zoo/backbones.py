"""Default configurations, with backbones of other libraries replaced by one of this library.

Detectors and the like take any backbone; where the default one comes from timm, a ResNet that gives as many maps
stands in, so that the architecture around it can be tried without that library.
"""

from __future__ import annotations

from typing import Any


def default_config(cls: Any) -> Any:
    """The default configuration of a class; no part of it needs timm where another backbone will do."""
    config = cls()
    _replace(config, set())
    return config


def _replace(config: Any, seen: set[int]) -> None:
    if id(config) in seen:
        return
    seen.add(id(config))
    for name, value in list(vars(config).items()):
        if not (hasattr(value, "to_dict") and hasattr(value, "model_type")):
            continue
        if value.model_type == "timm_backbone":
            setattr(config, name, _resnet(len(getattr(value, "out_indices", None) or [4])))
        else:
            _replace(value, seen)


def _resnet(maps: int) -> Any:
    from transformers import ResNetConfig

    stages = [f"stage{stage}" for stage in range(1, 5)]
    return ResNetConfig(
        embedding_size=64,
        hidden_sizes=[64, 128, 256, 512],
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=stages[-maps:],
    )
