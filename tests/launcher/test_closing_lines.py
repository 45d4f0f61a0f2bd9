"""The last lines of a run state what became of each model with workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemini.config.gemini_config import GeminiConfig
from gemini.launcher.run_summary import closing_lines
from gemini.runtime.call_outcome import FallbackReason
from gemini.runtime.run_journal import ModelJournal

FIRST = str(FallbackReason.FIRST_OF_SIZE)
EAGER = f"eager dispatch: {FIRST}"
CASES = {
    "Net: 8 of 9 calls overlapped, 12 ms per step (31 ms in this process: 2.58 ×)": ModelJournal(
        "Net", 2, steps={"overlapped": 8, "dispatched": 1}, reasons={EAGER: 1}, last_ms=[90.0, 12.0, 11.0],
        local_ms=31.0, other_sizes=1,
    ),
    "Net: 9 of 9 calls overlapped, 12 ms per step of changing sizes": ModelJournal(
        "Net", 2, steps={"overlapped": 9}, last_ms=[12.0], local_ms=31.0, other_sizes=5
    ),
    "Net: none of 9 calls overlapped (8 by single micro-batch): sums over the batch, 12 ms per step": ModelJournal(
        "Net", 2, steps={"undivided": 8, "dispatched": 1},
        reasons={EAGER: 9, "single micro-batch: sums over the batch": 8},
        last_ms=[12.0],
    ),
    f"Net: none of 1 calls overlapped (1 by eager dispatch): {FIRST}": ModelJournal(
        "Net", 2, steps={"dispatched": 1}, reasons={EAGER: 1}
    ),
    "Net: no call used the workers: the first one runs in this process": ModelJournal("Net", 2),
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_calls_times_and_the_main_reason(text: str) -> None:
    assert closing_lines([CASES[text]], GeminiConfig()) == [f"{text}; gemini explain shows more"]


def test_many_models_are_few_lines(tmp_path: Path) -> None:
    models = [ModelJournal(f"Net{at}", 2) for at in range(9)]
    lines = closing_lines(models, GeminiConfig(run_folder=str(tmp_path)))
    assert len(lines) == 5
    assert lines[-1].startswith("5 more models; gemini explain --run-folder ")
    assert closing_lines([], GeminiConfig()) == []
