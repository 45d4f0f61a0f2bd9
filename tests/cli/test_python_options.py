"""The command line of `gemini_python` is read as `python` reads its own, with Gemini's options taken out."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemini.cli.launcher_flags import OPTIONS, help_text, parse, setting_options
from gemini.errors import UsageError


def test_what_follows_the_program_belongs_to_it() -> None:
    found = parse(["--mode", "pipeline", "train.py", "--mode", "x", "-u", "--help"])
    assert (found.kind, found.target, found.args) == ("script", "train.py", ["--mode", "x", "-u", "--help"])
    assert found.settings() == {"mode": "pipeline"}


@given(
    st.lists(st.text(min_size=1)), st.sampled_from([["a.py"], ["-m", "mod"], ["-c", "code"], ["-"], ["--", "-odd.py"]])
)
def test_any_arguments_reach_the_program(args: list[str], program: list[str]) -> None:
    found = parse([*program, *args])
    assert found.args == args
    assert found.arguments() == [*program, *args]
    assert found.target == program[-1]


FLAGS = st.sampled_from(["-u", "-B", "-uB", "-OO", "-Wignore", "-Xdev", "-I", "--check-hash-based-pycs=always"])


@given(st.lists(FLAGS), st.lists(st.sampled_from(["--strict", "--seed=3", "-q", "--mode=auto"])), st.randoms())
def test_python_gets_its_own_flags_in_order_whatever_stands_between(flags: list[str], own: list[str], order) -> None:
    words = [*flags]
    for option in own:
        words.insert(order.randint(0, len(words)), option)
    found = parse([*words, "x.py"])
    assert found.arguments() == [*flags, "x.py"]
    assert found.flags == flags
    assert set(found.given) == {option.partition("=")[0].replace("-q", "--quiet") for option in own}


@pytest.mark.parametrize(
    ("words", "kind", "target", "typed"),
    [
        (["-mpkg.tool", "x"], "module", "pkg.tool", ["-mpkg.tool"]),
        (["-uBm", "pkg", "x"], "module", "pkg", ["-uBm", "pkg"]),
        (["-cprint(1)", "x"], "command", "print(1)", ["-cprint(1)"]),
        (["-Bc", "", "x"], "command", "", ["-Bc", ""]),
        (["-W", "error", "-", "x"], "stdin", "-", ["-W", "error", "-"]),
        (["-X", "-m", "a.py", "x"], "script", "a.py", ["-X", "-m", "a.py"]),
        (["-W", "a.py", "b.py", "x"], "script", "b.py", ["-W", "a.py", "b.py"]),
    ],
)
def test_clusters_and_values(words: list[str], kind: str, target: str, typed: list[str]) -> None:
    found = parse(words)
    assert (found.kind, found.target, found.typed, found.args) == (kind, target, typed, ["x"])


def test_letters_of_clusters_count_and_values_do_not() -> None:
    assert parse(["-OuO", "-W", "xO", "-Xx", "a.py"]).letters == "OuO"


def test_settings_are_named_and_typed_as_the_configuration_has_them() -> None:
    words = ["--stage-cnt", "4", "--sharding-dim=-1", "--memory-limit", "12GB", "--strict", "--seed", "x", "a.py"]
    assert parse(words).settings() == {
        "pipeline_degree": 4,
        "sharding_dim": -1,
        "memory_limit": "12GB",
        "strict": True,
        "seed": "x",
    }


def test_every_setting_is_a_field_of_the_configuration() -> None:
    from dataclasses import fields

    from gemini.config.gemini_config import GeminiConfig

    assert {name[2:].replace("-", "_") for name in setting_options()} == {field.name for field in fields(GeminiConfig)}


def test_names_may_be_repeated_or_listed() -> None:
    found = parse(["--passes", "a, b", "--passes=c", "--instrument", "x", "--instrument", "y.z", "s.py"])
    assert found.names("--passes") == ["a", "b", "c"]
    assert found.names("--instrument") == ["x", "y.z"]
    assert found.names("--skip-pass") == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--acum-degree", "4", "a.py"], "did you mean --accum-degree?"),
        (["--dumb", "a.py"], "did you mean --dump?"),
        (["--stage-count=3", "a.py"], "did you mean --stage-cnt?"),
        (["--zzzzzz", "a.py"], "gemini_python --help lists them"),
        (["-Z", "a.py"], "unknown option -Z"),
        (["--dump"], "--dump needs a value"),
        (["--dump=", "a.py"], "--dump needs a value"),
        (["--strict=yes", "a.py"], "--strict takes no value"),
        (["-m"], "-m needs a value"),
        (["-uc"], "-c needs a value"),
        (["-X"], "-X needs a value"),
    ],
)
def test_faults_are_named_with_a_remedy(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        parse(words)
    assert said in str(raised.value)
    assert "→" in str(raised.value)


def test_all_faults_are_reported_at_once() -> None:
    with pytest.raises(UsageError) as raised:
        parse(["--nope", "--moed=x", "-Z", "a.py"])
    assert all(fault in str(raised.value) for fault in ("--nope", "--moed", "-Z"))


@given(st.lists(st.text(max_size=6), max_size=5))
def test_no_command_line_breaks_the_parser(words: list[str]) -> None:
    with contextlib.suppress(UsageError):
        found = parse(words)
        assert found.args == words[len(words) - len(found.args) :]


def test_help_shows_every_option() -> None:
    text = help_text()
    assert all(option.name in text for option in OPTIONS)
    assert max(map(len, text.splitlines())) <= 120
