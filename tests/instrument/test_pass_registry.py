"""Passes are discovered by entry point; a broken one costs a log line, not the run."""

import json
import sys
from pathlib import Path

import pytest

from gemini.cli.main import main
from gemini.errors import PassError
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.pass_manager.registry import BUILT_IN, Registered, available, select
from gemini.instrument.passes.base import Pass


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution that brings one good pass, one that cannot be imported and one that is no pass."""
    info = tmp_path / "acme_passes-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-passes\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(
        "[gemini.passes]\nacme-linear = acme_passes:linear\nacme-broken = acme_missing:x\n"
        "acme-wrong = acme_passes:wrong\ndevice-placement = acme_passes:linear\n"
    )
    (tmp_path / "acme_passes.py").write_text(
        "from gemini.instrument.passes.pattern import Rewrite\n"
        "def linear(): return Rewrite('torch.nn.Linear($args)', 'acme.Linear($args)')\n"
        "def wrong(): return 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("acme_passes", None)


def test_built_in_passes_load_and_can_be_ordered() -> None:
    passes = select()
    assert [one.name for one in passes] == list(BUILT_IN)
    assert all(one.description for one in passes)
    PassManager(passes).schedule()


@pytest.mark.usefixtures("third_party")
def test_a_third_party_adds_a_pass() -> None:
    found = {one.name: one.origin for one in available()}
    assert found["acme-linear"] == "acme-passes 1.2"
    assert found["device-placement"] == "built-in", "a name that is taken keeps its owner"
    notices: list[str] = []
    passes = select(notice=notices.append)
    assert [one.name for one in passes] == [*BUILT_IN, "acme-linear"]
    assert len(notices) == 2
    assert all("\n" not in line for line in notices)
    assert "acme-broken" in notices[0]
    assert "No module named 'acme_missing'" in notices[0]
    assert "returns int, not a Pass" in notices[1]


@pytest.mark.usefixtures("third_party")
def test_a_broken_pass_asked_for_by_name_is_an_error() -> None:
    with pytest.raises(PassError, match=r"acme-passes 1\.2 cannot be loaded"):
        select(["acme-broken"])


def test_selection() -> None:
    assert [one.name for one in select(["device-placement"])] == ["device-placement"]
    assert [one.name for one in select(skip=["device-placement"])] == [
        "training-sites",
        "managed-objects",
        "tensor-types",
        "tensorflow-imports",
    ]
    with pytest.raises(PassError, match=r"(?s)unknown pass 'device-placment'.*did you mean 'device-placement'.*'zz'"):
        select(["device-placment"], ["zz"])


def test_what_a_pass_needs_comes_along() -> None:
    registered = [
        Registered("a", "here", f"{__name__}:A"),
        Registered("b", "here", f"{__name__}:B"),
        Registered("c", "here", f"{__name__}:C"),
    ]
    assert [one.name for one in select(["b"], registered=registered)] == ["a", "b"]
    with pytest.raises(PassError, match=r"pass 'b' needs 'a', which is skipped"):
        select(["b"], ["a"], registered=registered)


class A(Pass):
    name = "a"

    def edits(self, unit: object) -> list:
        return []


class B(A):
    name = "b"
    needs = ("a",)


class C(A):
    name = "c"


@pytest.mark.usefixtures("third_party")
def test_the_command_lists_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["passes", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["device-placement"]["origin"] == "built-in"
    assert rows["device-placement"]["description"]
    assert rows["acme-linear"]["origin"] == "acme-passes 1.2"
    assert "acme_missing" in rows["acme-broken"]["fault"]
    assert main(["passes"]) == 0
    shown = capsys.readouterr().out
    assert "acme-linear" in shown
    assert "built-in" in shown
