"""`gemini doctor` names what is there and what is missing; `gemini cache` counts and removes entries."""

from __future__ import annotations

import importlib.metadata
import json
import resource
from pathlib import Path

import pytest

from gemini.cli.main import main


def facts(capsys: pytest.CaptureFixture[str]) -> dict[str, dict[str, object]]:
    main(["doctor", "--json"])
    return {fact["name"]: fact for fact in json.loads(capsys.readouterr().out)}


def test_a_doctor_reports_this_installation(capsys: pytest.CaptureFixture[str]) -> None:
    found = facts(capsys)
    assert found["torch"]["found"] == importlib.metadata.version("torch")
    assert {"gemini", "python", "processor cores", "shared memory", "file descriptors", "cache folder"} <= set(found)
    assert "jinja2" in str(found["report"]["found"])
    assert not found["report"]["remedy"]


def test_a_missing_part_has_a_remedy(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.metadata.version

    def version(name: str) -> str:
        if name == "jinja2":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    found = facts(capsys)
    assert found["report"]["found"] == "missing: jinja2"
    assert found["report"]["remedy"] == "pip install 'gemini-instrumenter[report]'"


def test_too_few_descriptors_are_a_fault(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (64, 4096))
    assert main(["doctor"]) == 1
    assert " !! file descriptors       64, at most 4096\n      → ulimit -n 1024" in capsys.readouterr().out


def test_a_cache_is_counted_and_cleaned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["cache", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"] == {}
    for name, size in (("plans/a.json", 10), ("plans/b.json", 30), ("graphs/one/graph.json", 5)):
        path = tmp_path / "gemini" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(size))
    main(["cache", "--json"])
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    assert kinds == {"graphs": {"entries": 1, "bytes": 5}, "plans": {"entries": 2, "bytes": 40}}
    assert main(["cache", "--clean", "plan"]) == 2
    assert "no cache of plan\n    → the kinds are graphs, plans" in capsys.readouterr().err
    assert main(["cache", "--clean", "plans"]) == 0
    assert sorted(path.name for path in (tmp_path / "gemini").iterdir()) == ["graphs"]
    assert main(["cache", "--clean"]) == 0
    assert list((tmp_path / "gemini").iterdir()) == []
