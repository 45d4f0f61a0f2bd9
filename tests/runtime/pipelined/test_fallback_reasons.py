"""The reason of a slower path is complete and one line."""

from __future__ import annotations

from gemini.errors import ProfileError
from gemini.runtime.call_outcome import describe_failure, describe_planning_error


def test_all_that_is_wrong_is_said_and_not_what_to_do() -> None:
    error = ProfileError("the batch does not fit the graph:\n  - x is missing\n  - y is float32[3]\n    → capture it")
    assert describe_planning_error(error) == "the batch does not fit the graph: - x is missing - y is float32[3]"
    assert describe_planning_error(ValueError()) == "ValueError"


def test_a_failure_is_named_by_its_kind_and_first_line() -> None:
    assert describe_failure(RuntimeError("no\nmore")) == "RuntimeError: no"
