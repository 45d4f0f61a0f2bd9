"""`gemini simulate` and `gemini tune`: output, files and one error for faulty input."""

from __future__ import annotations

import json
import sys

import pytest

from gemini.cli.main import main
from gemini.cli.tune_worker import capture_script, reduce_output
from gemini.config.gemini_config import GeminiConfig

STEP = ["--model", "llama3-8b", "--cluster", "h100", "--devices", "16", "--batch", "32"]


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    said = capsys.readouterr()
    return code, said.out, said.err


def test_simulate_prints_parts_and_memory(capsys):
    code, out, _ = run(capsys, "simulate", *STEP, "--pipeline", "4", "--zero", "1")
    assert code == 0
    for word in ("tokens/s", "MFU", "bubble", "activations", "fits"):
        assert word in out


def test_simulate_writes_json_trace_and_page(capsys, tmp_path):
    trace, page = tmp_path / "step.json", tmp_path / "step.html"
    files = ["--trace", str(trace), "--html", str(page), "--json"]
    code, out, _ = run(capsys, "simulate", *STEP, "--pipeline", "4", "--zero", "1", *files)
    assert code == 0
    found = json.loads(out)
    assert found["fits"] is True
    assert sum(found["parts"].values()) == pytest.approx(found["seconds"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["tid"] for event in events if event["ph"] == "X"} == {0, 1, 2, 3}
    longest = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert longest == pytest.approx(found["seconds"] * 1e6, rel=0.01)
    text = page.read_text()
    assert text.count("<svg") == 3
    assert "1f1b" in text
    run(capsys, "simulate", *STEP, "--pipeline", "4", "--all-ranks", "--trace", str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    assert len({event["tid"] for event in events if event["ph"] == "X"}) == 16


def test_simulate_a_file_with_flags(capsys, tmp_path):
    request = tmp_path / "request.json"
    request.write_text(
        json.dumps({"model": "llama3-8b", "cluster": "h100", "parallel": {"devices": 8, "batch": 64, "zero": 3}})
    )
    code, out, _ = run(capsys, "simulate", str(request), "--devices", "32", "--json")
    assert code == 0
    assert json.loads(out)["parallel"]["devices"] == 32
    assert json.loads(out)["parallel"]["zero"] == 3


def test_list_names(capsys):
    code, out, _ = run(capsys, "simulate", "--list")
    assert code == 0
    assert "llama3-405b" in out
    assert "h100-500w" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate"], ["no --model and --cluster"]),
        (["simulate", "--model", "llama3-8c", "--cluster", "h100"], ["did you mean 'llama3-8b'"]),
        (["simulate", "--model", "llama3-8b", "--cluster", "h10"], ["did you mean 'h100'"]),
        (["simulate", "--model", "{layers: 2}", "--cluster", "h100"], ["not JSON"]),
        (["simulate", *STEP, "--tensor", "3"], ["16 devices for tensor 3"]),
        (["simulate", *STEP, "--pipeline", "4", "--schedule", "zb"], ["unknown schedule 'zb'"]),
        (["tune", *STEP, "--fix", "tensor"], ["no field with a value"]),
        (["tune", *STEP, "--fix", "tensr=2"], ["did you mean 'tensor'"]),
        (["tune", "nothing.py"], ["no file nothing.py"]),
        (
            ["tune", "--model", "llama3-405b", "--cluster", "h100", "--devices", "8"],
            ["fits nowhere", "devices would do"],
        ),
    ],
)
def test_faulty_input_is_one_error(capsys, arguments, words):
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert "Traceback" not in err
    for word in words:
        assert word in err


def test_tune_writes_configuration_request_and_page(capsys, tmp_path):
    config, request, page = tmp_path / "gemini.json", tmp_path / "best.json", tmp_path / "tune.html"
    files = ["--output", str(config), "--request", str(request), "--html", str(page)]
    code, out, _ = run(capsys, "tune", *STEP, *files, "--explain", "tensor=8,pipeline=1,chunks=1,zero=1,context=1")
    assert code == 0
    assert "why the first" in out
    assert "slower than the chosen one" in out
    GeminiConfig.load(config)
    assert page.read_text().count("<svg") >= 3
    code, out, _ = run(capsys, "simulate", str(request), "--json")
    assert code == 0
    assert json.loads(out)["fits"] is True


def test_tune_prints_json(capsys):
    code, out, _ = run(capsys, "tune", *STEP, "--json", "--fix", "tensor=1", "--among", "micro_batch=1,2")
    assert code == 0
    assert {one["parallel"]["tensor"] for one in json.loads(out)["ranked"]} == {1}


def test_a_script_that_trains_nothing_is_not_captured(tmp_path, monkeypatch):
    script = tmp_path / "nothing.py"
    script.write_text("print('hello')\n")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    from torch import nn

    monkeypatch.setattr(nn.Module, "__call__", nn.Module.__call__)
    assert capture_script(tmp_path / "out.json", 2, [str(script)]) == 3


SCRIPT = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, required=True)
width = parser.parse_args().width
model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(4)])
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(8, width)).mean().backward()
    optimizer.step()
"""


def test_a_script_with_arguments_after_the_options_is_captured(capsys, tmp_path):
    script, config = tmp_path / "train.py", tmp_path / "gemini.json"
    script.write_text(SCRIPT)
    code, out, err = run(capsys, "tune", str(script), "--measure", "0", "--output", str(config), "--", "--width", "16")
    assert (code, err) == (0, "")
    assert "Sequential on" in out
    GeminiConfig.load(config)


def test_outputs_become_a_loss():
    import torch

    assert reduce_output({"logits": torch.ones(2, 2)}) == 1
    assert reduce_output((torch.full((2,), 3.0),)) == 3
