"""Recipes: the values that the kinds of fields of a configuration get, in the order they are tried."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Recipe:
    """The values the kinds of fields get, and how bold the shrinking is."""

    width: int = 32
    heads: int = 4
    key_heads: int = 2
    feedforward: int = 64
    layers: int = 4
    vocabulary: int = 128
    depth: int = 2  # the most layers a stage, where there are several stages
    image: int = 32
    patch: int = 8
    widen_lists: bool = True
    gentle: bool = False  # only fewer layers and tokens: widths stay, for architectures with relations of their own
    rebuild: bool = False  # make the configuration anew from the small fields, so that derived ones follow
    fill: bool = False  # give a value to fields that are unset
    divide: int = 0  # divide every width by this and keep heads and patches: relations between widths stay

    @property
    def head(self) -> int:
        return self.width // self.heads


_DIVIDED = Recipe(divide=8, image=64)
_REST = (
    Recipe(rebuild=True),
    Recipe(key_heads=4),
    Recipe(width=64, heads=4, key_heads=4, feedforward=64, image=64, patch=16),
    Recipe(width=64, heads=2, key_heads=2, feedforward=128, image=64, patch=8, widen_lists=False),
)
_LAST = (
    Recipe(divide=8, image=64, depth=4, rebuild=True, fill=True),
    Recipe(key_heads=4, rebuild=True, fill=True),
    Recipe(key_heads=4, fill=True),
    Recipe(width=256, heads=2, key_heads=2, feedforward=128, image=64, patch=16, fill=True),  # heads of usual sizes
    Recipe(width=128, heads=2, key_heads=2, feedforward=128, image=64, patch=16, fill=True),
    Recipe(divide=4, layers=2, image=64, rebuild=True, fill=True),
    Recipe(divide=16, layers=2, image=64, rebuild=True, fill=True),
    Recipe(divide=32, layers=2, image=64, fill=True),
    Recipe(divide=8, layers=2, image=224),
    Recipe(width=128, heads=4, key_heads=4, feedforward=128, layers=2, image=64, patch=8, fill=True),
    Recipe(layers=2, image=64, gentle=True, fill=True),
)
# Dividing keeps what convolutions need of each other; equal widths make the smallest transformers.
RECIPES = (Recipe(), *_REST, _DIVIDED, *_LAST)
FOR_PICTURES = (Recipe(), _DIVIDED, *_REST, *_LAST)
