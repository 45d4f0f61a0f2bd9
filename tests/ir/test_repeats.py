"""Repeats: every span is where texts recur after its period, as long as possible, and is found once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gemini.ir.repeats import Repeats, Span

_texts = st.lists(st.sampled_from("abc"), max_size=6).flatmap(
    lambda body: st.tuples(st.lists(st.sampled_from("abc"), max_size=4), st.just(body), st.integers(1, 5)).map(
        lambda parts: parts[0] + parts[1] * parts[2] + parts[0]
    )
)


def _spans_at(texts: list[str], at: int) -> list[Span]:
    """The spans of the next recurrences of a text, place by place."""
    later = [other for other in range(at + 1, len(texts)) if texts[other] == texts[at]]
    found = []
    for period in (other - at for other in later[:4]):
        if 2 * period > len(texts):
            continue
        start = end = at
        while start and texts[start - 1] == texts[start - 1 + period]:
            start -= 1
        while end + period < len(texts) and texts[end] == texts[end + period]:
            end += 1
        found.append(Span(start, end + period, period))
    return found


@given(_texts)
@settings(max_examples=200, deadline=None)
def test_spans_are_those_of_a_plain_search(texts: list[str]) -> None:
    repeats = Repeats(texts)
    found = [span for at in range(len(texts)) for span in repeats.spans(at, 0)]
    expected = [span for at in range(len(texts)) for span in _spans_at(texts, at)]
    assert found == list(dict.fromkeys(expected))


def test_a_span_begins_at_the_lowest_place_or_later() -> None:
    assert next(Repeats("abababab").spans(4, 3)) == Span(3, 8, 2)
    assert Span(3, 8, 2).turns == 2
