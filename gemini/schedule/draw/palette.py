"""The colours of schedule pictures.

The hue encodes the micro-batch (eight hues in turn), the lightness the kind of work, so that kinds are
distinguishable in grey. Neighbouring micro-batches are distinguishable for colour-blind readers: without red and
green the order is blue, yellow, grey, repeated. Made in OKLCH with lightness .87, .70 and .47.
"""

from __future__ import annotations

from gemini.schedule.block import BACKWARD, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT

LIGHT, MIDDLE, DARK, OTHER = range(4)

SHADES = {FORWARD: LIGHT, BACKWARD: MIDDLE, INPUT_GRADIENT: MIDDLE, WEIGHT_GRADIENT: DARK}

MICRO_BATCHES = (
    ("#b9d7fd", "#61a1f0", "#1e5ba1"),  # blue
    ("#fec995", "#d78b35", "#814d08"),  # orange
    ("#92e8d1", "#08b89a", "#0a6a58"),  # teal
    ("#dbcafe", "#ac8ae5", "#674698"),  # violet
    ("#e2d690", "#b29f25", "#675b09"),  # yellow
    ("#ffbfdc", "#dc79aa", "#8e3665"),  # pink
    ("#8ee3fd", "#04b0d5", "#0d657a"),  # sky
    ("#ffc4b9", "#e67b6b", "#96372b"),  # red
)
NEUTRAL = ("#d9dde3", "#a0a8b4", "#565f6d", "#f3f4f6")  # the same lightnesses without hue, for legends

INK = "#1f2328"
INK_ON_DARK = "#ffffff"
FAINT = "#656d76"
LINE = "#d0d7de"
IDLE, IDLE_HATCH = "#f6f8fa", "#cdd3da"
MEMORY, MEMORY_EDGE, LIMIT = "#c9d3e0", "#7b8aa0", "#b3261e"
PHASES = {"warm-up": "#e9edf2", "steady state": "#c9d6e8", "cool-down": "#e9edf2"}
REPETEND = "#e3ebf6"


def fill(mid: int, shade: int) -> str:
    """The colour of a block; user-defined kinds of work are white with a coloured edge."""
    return "#ffffff" if shade == OTHER else MICRO_BATCHES[mid % len(MICRO_BATCHES)][shade]


def edge(mid: int, shade: int) -> str:
    """The colour of a block's outline."""
    return MICRO_BATCHES[mid % len(MICRO_BATCHES)][DARK] if shade == OTHER else "#ffffff"


def ink(shade: int) -> str:
    """The colour of text on a block."""
    return INK_ON_DARK if shade == DARK else INK
