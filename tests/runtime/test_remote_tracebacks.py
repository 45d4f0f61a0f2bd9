"""Frames of a remote traceback print as the original ones; Gemini's frames can be removed."""

from __future__ import annotations

import gc
import json
import pickle
import traceback
import weakref
from typing import Any

import pytest

from gemini.runtime import tracebacks
from gemini.runtime.tracebacks import attach_traceback, call_site, exception_chain, strip_frames


def fails(how: str) -> int:
    return inner(how) + len(how)


def inner(how: str) -> int:
    try:
        return {"é": 1}[how]
    except KeyError as error:
        if how == "cause":
            raise ValueError(how) from error
        if how == "nothing":
            raise ValueError(how) from None
        raise ValueError(  # noqa: B904 - the exception that it is raised in is the point
            how,
        )


def raised(how: str) -> ValueError:
    with pytest.raises(ValueError) as caught:
        fails(how)
    return caught.value


@pytest.mark.parametrize("how", ["cause", "context", "nothing"])
def test_what_is_rebuilt_is_shown_as_the_original(how: str) -> None:
    error = raised(how)
    made = ValueError(*error.args)
    attach_traceback(made, exception_chain(error, lambda one: (type(one), one.args)), lambda sent: sent[0](*sent[1]))
    shown = traceback.format_exception(type(error), error, error.__traceback__)
    if how == "nothing":
        assert made.__context__ is None
    assert traceback.format_exception(type(made), made, made.__traceback__) == shown


def test_frames_outlive_collections_and_go_with_their_exception() -> None:
    error = raised("nothing")
    made = ValueError(*error.args)
    attach_traceback(made, exception_chain(error, repr), repr)
    gc.collect()  # Python 3.12 and later would free what a frame knows that keeps itself
    assert [frame.f_globals for frame, _ in traceback.walk_tb(made.__traceback__)] == [{}, {}, {}]
    assert pickle.loads(pickle.dumps(made)).args == made.args
    waiting = [weakref.ref(one) for one in made._gemini_frames.waiting]  # type: ignore[attr-defined]
    trace = made.__traceback__
    del made
    assert [one() for one in waiting] == [None, None, None]
    gc.collect()
    assert [entry.name for entry in traceback.extract_tb(trace)] == ["raised", "fails", "inner"]


def test_frames_of_ours_are_taken_out(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised("context")
    names = [entry.name for entry in traceback.extract_tb(error.__traceback__)]
    assert names == ["raised", "fails", "inner"]

    def is_ours(code: Any) -> bool:
        return code.co_name == "fails"

    monkeypatch.setattr(tracebacks, "_is_ours", is_ours)
    assert [entry.name for entry in traceback.extract_tb(strip_frames(error))] == ["raised", "inner"]
    monkeypatch.setattr(tracebacks, "_is_ours", lambda code: True)
    assert strip_frames(error) is error.__traceback__ is not None


def test_the_caller_is_the_program() -> None:
    def call() -> Any:
        return call_site()

    assert str(call()).startswith(f"{__file__}:")


def test_an_interrupt_of_our_work_is_shown_where_the_program_was(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(_: str) -> Any:
        try:
            return int("")
        except ValueError:
            raise KeyboardInterrupt  # noqa: B904 - as a signal does

    def ours() -> None:
        json.loads("[1, 2]", parse_int=interrupt)

    with pytest.raises(KeyboardInterrupt) as caught:
        ours()
    error = caught.value

    def is_ours(code: Any) -> bool:
        return code.co_name in ("ours", "interrupt")

    monkeypatch.setattr(tracebacks, "_is_ours", is_ours)
    monkeypatch.setattr(tracebacks, "_is_user_code", lambda code: code.co_name.startswith("test_"))
    strip_frames(error)
    assert [entry.name for entry in traceback.extract_tb(error.__traceback__)] == [
        "test_an_interrupt_of_our_work_is_shown_where_the_program_was"
    ]
    assert error.__suppress_context__
