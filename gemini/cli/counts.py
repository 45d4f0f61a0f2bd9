"""Counts on the command line: readers of whole numbers for argparse."""

from __future__ import annotations

import argparse


def positive(text: str) -> int:
    """Read a number from 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """Read a number from 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is below {least}")
    return value
