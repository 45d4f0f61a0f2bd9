"""Loops in generated stages: equal to the unrolled stages, found in time proportional to the length of the loop."""

from __future__ import annotations

from functools import partial
from unittest.mock import patch

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gemini.capture import capture
from gemini.codegen import generate_stages
from gemini.codegen.name_spans import NameAllocator
from gemini.codegen.roll_loops import Rolled
from tests.codegen.cutting import Sequential, even_cut
from tests.codegen.repeated_steps import WIDTH, CellLoop, LoopProgram, count_operations

_bodies = st.lists(st.sampled_from(["a", "b", "first", "tanh", "collect"]), min_size=1, max_size=4)
_loops = st.lists(st.tuples(st.integers(1, 6), _bodies), min_size=1, max_size=3)


@given(_loops, st.integers(1, 3))
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
def test_rolled_stages_equal_unrolled_ones(loops: list[tuple[int, list[str]]], count: int) -> None:
    model, x = LoopProgram(loops), torch.randn(3, WIDTH)
    graph = capture(model, (x,), {})
    partition = even_cut(graph, count)
    rolled = generate_stages(graph, partition)
    with patch("gemini.codegen.stage_generator.roll", lambda graph, steps, *_: Rolled(list(steps))):
        plain = generate_stages(graph, partition)
    assert not any("for " in code.source.partition("def forward")[2] for code in plain)
    results = [Sequential(graph, codes)(x) for codes in (rolled, plain)]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], model(x))


def test_a_long_loop_is_rolled() -> None:
    graph = capture(LoopProgram([(40, ["a", "tanh", "b"])]), (torch.randn(2, WIDTH),), {})
    (code,) = generate_stages(graph, even_cut(graph, 1))
    assert "in range(40):" in code.source or "in range(39):" in code.source


def test_operations_grow_in_proportion_to_the_loop() -> None:
    counts = []
    for turns in (40, 80):
        graph = capture(CellLoop(), (torch.randn(2, turns),), {})
        generate = partial(generate_stages, graph, even_cut(graph, 2))
        generate()  # memoizes texts of the model's source
        counts.append(count_operations(generate, "codegen", "ir"))
    assert counts[1] < 2.2 * counts[0]


@given(
    st.lists(st.tuples(st.sampled_from("xy"), st.integers(0, 4), st.integers(0, 12), st.integers(0, 3)), max_size=25)
)
@settings(max_examples=200, deadline=None)
def test_a_variable_gets_the_first_free_name(wanted: list[tuple[str, int, int, int]]) -> None:
    names, held, position = NameAllocator({"y_2"}), dict[str, list[tuple[int, int]]](), 0
    for name, gap, length, more in wanted:
        position += gap
        spans = [(position, position + length)]
        spans += [(position + length + more, position + length + 2 * more)] if more else []
        blocked = {one for one, others in held.items() if any(_overlap(a, b) for a in others for b in spans)} | {"y_2"}
        candidates = [name, *(f"{name}_{number}" for number in range(2, 40))]
        expected = next(one for one in candidates if one not in blocked)
        assert names.assign(name, spans) == expected
        held.setdefault(expected, []).extend(spans)


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] == b[0] or (a[0] < b[1] and b[0] < a[1])
