"""The round trip: plain python on the dump prints what gemini_python, and python, print on the program."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from gemini.cli.main import main
from gemini.instrument.output import DUMP_MARKER

MOVES = 'class T:\n    def cuda(self): return "moved by its own method"\n'  # instrumented, and needs no torch


@dataclass
class Project:
    """A small program: its files, how it starts, and what it is given."""

    files: dict[str, str | bytes]
    start: list[str] = field(default_factory=lambda: ["main.py"])
    args: list[str] = field(default_factory=list)
    input: str = ""


PROJECTS = {
    "shebang, encoding, docstring, future": Project(
        {
            "main.py": (
                "#!/usr/bin/env python\n# -*- coding: latin-1 -*-\n# a comment\n"
                '"""Dokumentation é."""\nfrom __future__ import annotations\n'
                "def f(x: undefined) -> None: ...\n" + MOVES + "print(__doc__, T().cuda(), 'é', f.__annotations__)\n"
            ).encode("latin-1")
        }
    ),
    "byte order mark and carriage returns": Project(
        {"main.py": b"\xef\xbb\xbf" + (MOVES + "print('\u00e9', T().cuda())\n").replace("\n", "\r\n").encode()}
    ),
    "first statement is compound, no line end at the end": Project(
        {"main.py": "def f(x): return x.cuda()\n" + MOVES + "print(f(T()))"}
    ),
    "a decorator first, and __file__ used": Project(
        {
            "main.py": "@staticmethod\ndef f(x): return x.cuda()\n"
            + MOVES
            + "import os\nprint(os.path.basename(__file__), open(__file__).read()[:13], f(T()))\n"
        }
    ),
    "package with relative imports": Project(
        {
            "main.py": "from pkg import Net, helper\nfrom pkg.deep import *\nprint(Net().cuda(), helper.NAME, VALUE)\n",
            "pkg/__init__.py": "from .net import Net\nfrom . import helper\n",
            "pkg/net.py": "from .helper import NAME\nclass Net:\n    def cuda(self): return NAME + __name__\n",
            "pkg/helper.py": "NAME = 'helper'\n",
            "pkg/deep/__init__.py": "from ..helper import NAME\nfrom .inner import *\n__all__ = ['VALUE']\n",
            "pkg/deep/inner.py": "VALUE = 3\nclass Q:\n    def move(self, x): return x.cuda()\n",
        }
    ),
    "namespace package": Project(
        {
            "main.py": "import space.one\nfrom space.sub import two\nprint(space.one.f(), two.g())\n",
            "space/one.py": MOVES + "def f(): return T().cuda()\n",
            "space/sub/two.py": "from ..one import f\ndef g(): return f() * 2\n",
        }
    ),
    "data beside the files": Project(
        {
            "main.py": "import os, pkg\n" + MOVES + "here = os.path.dirname(__file__)\n"
            "print(open(os.path.join(here, 'data.txt')).read(), pkg.read(), T().cuda())\n",
            "data.txt": "beside the script",
            "pkg/__init__.py": "from pathlib import Path\n"
            "def read(): return (Path(__file__).parent / 'own.txt').read_text()\n",
            "pkg/own.txt": "beside the package",
        }
    ),
    "package resources": Project(
        {
            "main.py": "import pkg\nprint(pkg.read())\n",
            "pkg/__init__.py": "import pkgutil\nfrom importlib import resources\n"
            "def read():\n    other = (resources.files(__name__) / 'a.json').read_text()\n"
            "    return pkgutil.get_data(__name__, 'deep/own.txt'), other\n",
            "pkg/deep/own.txt": "resource",
            "pkg/a.json": "{}",
        }
    ),
    "computed imports": Project(
        {
            "main.py": "import importlib, pkgutil, pkg\nfor name in ('a', 'b'):\n"
            "    print(importlib.import_module(f'pkg.{name}').NAME, importlib.import_module('plug_' + name).NAME)\n"
            "print([m.name for m in pkgutil.iter_modules(pkg.__path__)])\n",
            "pkg/__init__.py": "",
            "pkg/a.py": "NAME = 'pkg.a'\n",
            "pkg/b.py": "NAME = 'pkg.b'\n",
            "plug_a.py": "NAME = 'plug a'\n",
            "plug_b.py": MOVES + "NAME = T().cuda()\n",
        }
    ),
    "search path changed by the script": Project(
        {
            "main.py": "import os, sys\nhere = os.path.dirname(os.path.abspath(__file__))\n"
            "sys.path.insert(0, os.path.join(here, 'src'))\n"
            "import found\nprint(found.f())\n",
            "src/found.py": MOVES + "def f(): return T().cuda()\n",
        }
    ),
    "imports in functions": Project(
        {
            "main.py": "def f():\n    from lazy import g\n    return g()\nprint(f())\n",
            "lazy.py": MOVES + "def g():\n    import other\n    return T().cuda(), other.X\n",
            "other.py": "X = 1\n",
        }
    ),
    "module with a syntax error that is never needed": Project(
        {
            "main.py": MOVES
            + "try:\n    import broken\nexcept SyntaxError as e:\n    print('broken')\nprint(T().cuda())\n",
            "broken.py": "def f(:\n",
        }
    ),
    "imported by its own module, and pickled": Project(
        {
            "main.py": "import pickle, other\n" + MOVES + "if __name__ == '__main__':\n"
            "    print(type(pickle.loads(pickle.dumps(T()))) is T, other.again().T is not T, T().cuda(), __name__)\n",
            "other.py": "def again():\n    import main\n    return main\n",
        }
    ),
    "arguments, standard input and exit code": Project(
        {
            "main.py": "import sys\n"
            + MOVES
            + "print(sys.argv[0].endswith('main.py'), sys.argv[1:], input(), T().cuda())\nsys.exit(3)\n"
        },
        args=["--epochs", "3", "a b"],
        input="typed\n",
    ),
    "usage error": Project(
        {
            "main.py": "import argparse\nparser = argparse.ArgumentParser()\n"
            "parser.add_argument('--n', type=int)\nprint(parser.parse_args())\n"
        },
        args=["--n", "x"],
    ),
    "an odd file name": Project({"my-script.v2.py": MOVES + "print(T().cuda())\n"}, start=["my-script.v2.py"]),
    "spawned processes": Project(
        {
            "main.py": "import multiprocessing\nfrom work import f\n" + MOVES + "def g(x): return T().cuda(), f(x)\n"
            "if __name__ == '__main__':\n    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
            "        print(pool.map(g, [1, 2]))\n",
            "work.py": "def f(x): return x + 1\n",
        }
    ),
    "python -m package": Project(
        {
            "tool/__init__.py": "",
            "tool/__main__.py": "import sys\nfrom .core import T\n"
            "print(T().cuda(), __name__, __package__, sys.argv[1:])\n",
            "tool/core.py": MOVES,
        },
        start=["-m", "tool"],
        args=["x"],
    ),
    "python -m module": Project(
        {
            "tool/__init__.py": "import side\n",
            "tool/train.py": "from . import core\nimport pickle\nclass P: pass\n"
            "print(core.T().cuda(), __name__, type(pickle.loads(pickle.dumps(P()))) is P)\n",
            "tool/core.py": MOVES,
            "side.py": "print('side')\n",
        },
        start=["-m", "tool.train"],
    ),
}


def build(project: Project, folder: Path) -> Path:
    for name, content in project.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def execute(command: list[str], folder: Path, project: Project) -> tuple[int, str, str]:
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    done = subprocess.run(
        [*command, *project.args],
        cwd=folder, input=project.input, capture_output=True, text=True, timeout=60, env=environment, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", PROJECTS)
def test_the_dump_runs_like_the_program(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = PROJECTS[name]
    folder = build(project, tmp_path / "a folder, coding=ascii")
    dumped = tmp_path / "dumped"
    monkeypatch.chdir(folder)
    assert main(["dump", *project.start, "-o", str(dumped)]) == 0
    start = dumped if project.start[0] == "-m" else dumped / project.start[0]
    plain = execute([sys.executable, *project.start], folder, project)
    ours = execute([sys.executable, "-m", "gemini.cli.python", *project.start], folder, project)
    again = execute([sys.executable, str(start)], folder, project)
    assert ours == plain
    assert again == plain


@pytest.mark.parametrize("name", PROJECTS)
def test_every_file_says_what_it_is(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = PROJECTS[name]
    folder = build(project, tmp_path / "project")
    monkeypatch.chdir(folder)
    assert main(["dump", *project.start, "-o", str(tmp_path / "dumped")]) == 0
    for path in (tmp_path / "dumped").rglob("*.py"):
        head = path.read_bytes().decode("latin-1").removeprefix("\xef\xbb\xbf").splitlines()[:4]
        assert any(line.startswith(("# Instrumented by Gemini.", "# Written by Gemini")) for line in head), path


def test_only_the_header_and_the_edits_differ(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    text = "#!/usr/bin/python\n'''Doc.'''\nimport torch   # torch\n\nx = ( torch.ones(2)  # odd\n    .cuda( ) )\n"
    script.write_text(text)
    script.chmod(0o755)
    assert main(["dump", str(script), "-o", str(tmp_path / "out")]) == 0
    lines = (tmp_path / "out" / "train.py").read_text().splitlines()
    assert lines[:10] == [
        "#!/usr/bin/python",
        "# Instrumented by Gemini.",
        "#",
        f"#   from {script}",
        "#   training-sites: nothing to change",
        "#   managed-objects: the file does not mention .parameters( or .named_parameters(",
        "#   tensor-types: nothing to change",
        "#   device-placement: 1 edit, on line 5 of the original",
        "#   tensorflow-imports: the file does not mention tensorflow",
        "'''Doc.'''",
    ]
    assert lines[10:] == [
        "import gemini.managed as __gemini__; import torch   # torch",
        "",
        "x = ( __gemini__.on(torch.ones(2))  # odd",
        "    .cuda( ) )",
    ]
    assert os.access(tmp_path / "out" / "train.py", os.X_OK)


def test_what_is_unchanged_says_so(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("print(1)\n")
    assert main(["dump", str(script), "-o", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "plain.py").read_text()
    assert "#   no pass changed this file\n" in text
    assert text.endswith("\nprint(1)\n")


def test_an_earlier_dump_is_replaced_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, out = tmp_path / "s.py", tmp_path / "out"
    script.write_text("print(1)\n")
    out.mkdir()
    assert main(["dump", str(script), "-o", str(out)]) == 0
    (out / "left-over.py").write_text("")
    assert main(["dump", str(script), "-o", str(out)]) == 0
    assert sorted(os.listdir(out)) == [DUMP_MARKER, "s.py"]
    os.unlink(out / DUMP_MARKER)
    capsys.readouterr()
    assert main(["dump", str(script), "-o", str(out)]) == 2
    said = capsys.readouterr()
    assert "is not empty and not an earlier dump" in said.err
    assert said.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "s.py"]


def test_bad_input_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, file = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "file"
    good.write_text("print(1)\n")
    bad.write_text("def f(:\n")
    file.write_text("")
    cases = {
        ("nowhere.py", "-o", "out"): "cannot read nowhere.py",
        (str(bad), "-o", "out"): "SyntaxError",
        ("-m", "no.such.module", "-o", "out"): "No module named no.such.module",
        (str(good),): "name one with -o DIR",
        (str(good), "-o", str(file)): "is a file",
        (str(good), "-o", str(file / "below")): "",
        (str(good), "-o", "out", "--passes", "none-such"): "unknown pass 'none-such'",
        (str(good), "-o", str(tmp_path)): "is not empty and not an earlier dump",
    }
    os.chdir(tmp_path)
    for arguments, said in cases.items():
        assert main(["dump", *arguments]) == 2, arguments
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.py", "file", "good.py"]


def test_diff_is_a_patch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "s.py"
    script.write_text("import torch\nx = torch.ones(2).cuda()\nprint(x)")
    assert main(["dump", str(script), "--diff"]) == 0
    assert capsys.readouterr().out == textwrap.dedent("""\
        --- a/s.py
        +++ b/s.py
        @@ -1,3 +1,3 @@
        -import torch
        -x = torch.ones(2).cuda()
        +import gemini.managed as __gemini__; import torch
        +x = __gemini__.on(torch.ones(2)).cuda()
         print(x)
        \\ No newline at end of file
        """)


def test_the_launchers_options_do_the_same(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text("import torch\nx = torch.ones(2).cuda()\n")
    command = [
        sys.executable,
        "-m",
        "gemini.cli.python",
        "--dump",
        str(tmp_path / "out"),
        "--diff",
        str(script),
        "--epochs",
        "3",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "+x = __gemini__.on(torch.ones(2)).cuda()" in done.stdout
    assert "__gemini__" in (tmp_path / "out" / "s.py").read_text()


def test_modules_found_through_a_changed_search_path_are_the_dumped_ones(tmp_path: Path) -> None:
    project = PROJECTS["search path changed by the script"]
    build(project, tmp_path / "project")
    script = tmp_path / "project" / "main.py"
    script.write_text(script.read_text() + "print(hasattr(found, '__gemini__'), found.__file__)\n")
    assert main(["dump", str(script), "-o", str(tmp_path / "out")]) == 0
    command = [sys.executable, str(tmp_path / "out" / "main.py")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert str(tmp_path / "out" / "found.py") in done.stdout
