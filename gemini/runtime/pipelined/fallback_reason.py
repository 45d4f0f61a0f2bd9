"""Reasons: why a call took a slower path, in one line, as the user and the journal are told."""

from __future__ import annotations

_LONGEST = 300


def of_plan(error: Exception) -> str:
    """Why there is no plan: all that the error says is wrong, without what to do about it."""
    said = str(error).partition("\n    →")[0]
    return " ".join(said.split())[:_LONGEST] or type(error).__name__


def of_failure(error: Exception) -> str:
    """What has failed: the kind of error and its first line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST]
