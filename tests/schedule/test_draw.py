"""Pictures of schedules: every format holds every block, odd plans draw, large ones stay fast."""

from __future__ import annotations

import json
import re
import struct
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from handmade import interleaved, one_f_one_b
from hypothesis import given, settings
from strategies import plans

from gemini.errors import ArtifactError, MissingEngineError, ScheduleError
from gemini.schedule import Block, Proof, SchedPlan
from gemini.schedule.draw import SUFFIXES, draw
from gemini.schedule.draw.figure_layout import lay_out, text_width
from gemini.schedule.draw.html_page import render_page
from gemini.schedule.draw.palette import MICRO_BATCHES, NEUTRAL
from gemini.schedule.draw.timeline import timeline
from gemini.schedule.text_grid import format_time

MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF", ".html": b"<!doctype html>"}


def real_valued() -> SchedPlan:
    return one_f_one_b(4, 8, spans=(1.137, 2.031, 0))


def odd_plans() -> dict[str, SchedPlan]:
    several = SchedPlan(3)
    several.add_block_seq([Block(0, 1, 2, "forward"), Block(0, 0.5, -3, "my_loss")], [(0, 1, 2), 1])
    limited = one_f_one_b(2, 1)
    limited.memory = (2.5, 1)
    return {
        "empty": SchedPlan(2),
        "one block": one_f_one_b(1, 1),
        "several devices, own kind, memory below zero": several,
        "limits": limited,
        "split": interleaved(2, 3, split=True, v=True),
        "real": real_valued(),
    }


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("name", odd_plans())
def test_every_format_draws_every_plan(tmp_path: Path, name: str, suffix: str) -> None:
    path = draw(odd_plans()[name], tmp_path / f"plan{suffix}")
    assert path.read_bytes().startswith(MAGIC[suffix])


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    for suffix in SUFFIXES:
        first = draw(one_f_one_b(2, 3), tmp_path / f"a{suffix}").read_bytes()
        assert first == draw(one_f_one_b(2, 3), tmp_path / f"b{suffix}").read_bytes()


def test_an_unknown_suffix_lists_the_known_and_writes_nothing(tmp_path: Path) -> None:
    for name in ("plan.jpeg", "plan"):
        with pytest.raises(ScheduleError, match=r"\.png, \.svg, \.pdf, \.html"):
            draw(one_f_one_b(2, 2), tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_there_is_an_error_of_ours(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="cannot write"):
        draw(one_f_one_b(2, 2), tmp_path / "nowhere" / "plan.png")


def test_without_matplotlib_figures_name_the_extra_and_pages_still_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [module for module in sys.modules if module.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingEngineError, match=r"gemini-instrumenter\[viz\]"):
        draw(one_f_one_b(2, 2), tmp_path / "plan.png")
    assert draw(one_f_one_b(2, 2), tmp_path / "plan.html").exists()


# ---------------------------------------------------------------- what is in the picture


@given(plans())
@settings(max_examples=40, deadline=None)
def test_busy_and_idle_fill_each_row_exactly(plan: SchedPlan) -> None:
    picture = timeline(plan)
    for device, row in enumerate(picture.rows):
        stretches = [(plan.step(block), plan.step(block) + block.span) for block in row.blocks] + list(row.idle)
        stretches.sort()
        assert sum(end - begin for begin, end in stretches) == pytest.approx(plan.nsteps)
        for (_, end), (begin, _) in pairwise(stretches):
            assert end == pytest.approx(begin)
        assert row.peak == plan.peak_memory(device)


def test_labels_fit_their_blocks() -> None:
    for plan in (one_f_one_b(4, 8), interleaved(4, 8, split=True), real_valued(), one_f_one_b(32, 128)):
        layout = lay_out(timeline(plan))
        for block in plan:
            text = layout.label(block)
            assert not text or text_width(text, layout.label_size) <= float(block.span) * layout.per_unit


def test_small_plans_show_names_and_large_ones_none() -> None:
    assert lay_out(timeline(one_f_one_b(4, 8))).label_form == "action"
    assert lay_out(timeline(interleaved(4, 8, split=True))).label_form == "action"
    assert lay_out(timeline(one_f_one_b(32, 128))).label_form == ""


def test_kinds_differ_in_lightness_alone() -> None:
    """In grey every forward is lighter than every backward, and that than every weight gradient."""

    def grey(colour: str) -> float:
        red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    tones = [[grey(row[tone]) for row in (*MICRO_BATCHES, NEUTRAL)] for tone in range(3)]
    assert min(tones[0]) > max(tones[1])
    assert min(tones[1]) > max(tones[2])


def test_a_large_plan_draws_as_few_objects(tmp_path: Path) -> None:
    path = draw(one_f_one_b(32, 128), tmp_path / "plan.png")
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    assert 2000 < width < 6000
    assert 1500 < height < 4000


def test_headline_says_period_bubble_makespan_and_proof() -> None:
    plan = one_f_one_b(4, 8)
    plan.proof = Proof(3, 3, True, "hand", 0.0, (), makespan=33, makespan_bound=30)
    assert dict(timeline(plan).headline) == {
        "period": "3 (optimal)",
        "bubble rate": "27.3%",
        "makespan": "33 (bound 30)",
        "peak memory": "4",
    }


@pytest.mark.parametrize(
    ("value", "text"), [(3, "3"), (3.0, "3"), (16 / 3, "5.3333"), (123456789, "123456789"), (1e9, "1000000000")]
)
def test_numbers_read_well(value: float, text: str) -> None:
    assert format_time(value) == text


# ---------------------------------------------------------------- the page


class _Outside(HTMLParser):
    """Collects every reference to something outside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [f"{tag} {name}={value}" for name, value in attrs if name in ("src", "href", "action", "data")]


def test_the_page_loads_nothing_and_holds_every_block() -> None:
    plan = interleaved(4, 8, split=True, v=True)
    page = render_page(timeline(plan))
    parser = _Outside()
    parser.feed(page)
    assert not parser.found
    assert not re.search(r"https?://|@import|url\(", page)
    data = json.loads(re.search(r"const PLAN = (\{.*\});", page).group(1))  # type: ignore[union-attr]
    assert [block[0] for block in data["blocks"]] == [str(block) for block in plan]
    assert [block[5] for block in data["blocks"]] == [plan.step(block) for block in plan]


def test_names_cannot_break_out_of_the_page() -> None:
    plan = SchedPlan(1)
    plan.add_block(Block(0, 1, 0, "</script><b>x"), 0, 0)
    page = render_page(timeline(plan, title="</title><script>alert(1)</script>"))
    assert page.count("<script>") == 1
    assert page.count("</script>") == 1
    assert "</script><b>" not in page


# ---------------------------------------------------------------- colours

# What remains of linear red, green and blue without the long, middle or short cones (Machado and others, 2009).
COLOUR_BLIND = {
    "protanopia": [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
    "deuteranopia": [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    "tritanopia": [[1.256, -0.077, -0.179], [-0.078, 0.931, 0.148], [0.005, 0.691, 0.304]],
}


def linear(colour: str) -> list[float]:
    values = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [value / 12.92 if value <= 0.04045 else ((value + 0.055) / 1.055) ** 2.4 for value in values]


def lab(rgb: list[float]) -> list[float]:
    """CIE L*a*b*, in which distances are about as large as they look."""
    to_xyz = [[0.4339, 0.3762, 0.1899], [0.2126, 0.7152, 0.0722], [0.0177, 0.1095, 0.8728]]
    x, y, z = (sum(k * min(max(c, 0), 1) for k, c in zip(row, rgb)) for row in to_xyz)
    x, y, z = (value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z))
    return [116 * y - 16, 500 * (x - y), 200 * (y - z)]


@pytest.mark.parametrize("kind", COLOUR_BLIND)
@pytest.mark.parametrize("tone", range(3))
def test_neighbouring_micro_batches_differ_for_colour_blind_readers(kind: str, tone: int) -> None:
    seen = [
        lab([sum(k * c for k, c in zip(row, linear(hue[tone]))) for row in COLOUR_BLIND[kind]]) for hue in MICRO_BATCHES
    ]
    for one, next_one in pairwise([*seen, seen[0]]):
        assert sum((a - b) ** 2 for a, b in zip(one, next_one)) ** 0.5 > 8
