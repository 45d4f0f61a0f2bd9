"""User code is instrumented wherever it is imported from, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import GEMINI, PYTHON, Outcome, run
from plugin import with_plugin

SAY = "word = 'plain'\n"
Files = dict[str, str | bytes]


def gemini(tmp_path: Path, files: Files, *argv: str) -> Outcome:
    return run(GEMINI, with_plugin("hook", files, *argv), tmp_path / "project")


def python(tmp_path: Path, files: Files, *argv: str) -> Outcome:
    return run(PYTHON, with_plugin("hook", files, *argv), tmp_path / "project")


INSTRUMENTED = {
    "main": ({"main.py": "print('plain')"}, ["main.py"]),
    "command": ({}, ["-c", "print('plain')"]),
    "module": ({"pkg/__init__.py": "", "pkg/tool.py": "print('plain')"}, ["-m", "pkg.tool"]),
    "package-main": ({"pkg/__init__.py": "", "pkg/__main__.py": "print('plain')"}, ["-m", "pkg"]),
    "directory": ({"app/__main__.py": "print('plain')"}, ["app"]),
    "imported": ({"main.py": "import own; print(own.word)", "own.py": SAY}, ["main.py"]),
    "imported-from-module": ({"main.py": "import own; print(own.word)", "own.py": SAY}, ["-m", "main"]),
    "lazy": (
        {"main.py": "def f():\n    from pkg.deep import word\n    print(word)\nf()", "pkg/deep.py": SAY},
        ["main.py"],
    ),
    "reloaded": (
        {"main.py": "import own, importlib; own.word = 0; importlib.reload(own); print(own.word)", "own.py": SAY},
        ["main.py"],
    ),
    "run-path": ({"main.py": "import runpy; print(runpy.run_path('own.py')['word'])", "own.py": SAY}, ["main.py"]),
    "run-module": ({"main.py": "import runpy; print(runpy.run_module('own')['word'])", "own.py": SAY}, ["main.py"]),
    "spec-from-file": (
        {
            "main.py": "import importlib.util as u\ns = u.spec_from_file_location('x', 'own.py')\n"
            "m = u.module_from_spec(s); s.loader.exec_module(m); print(m.word)",
            "own.py": SAY,
        },
        ["main.py"],
    ),
    "elsewhere": (
        {"main.py": "import sys; sys.path.insert(0, 'lib'); import own; print(own.word)", "lib/own.py": SAY},
        ["main.py"],
    ),
    "shadowed-library": (
        {"main.py": "import ast, own; print(own.word, ast.x)", "own.py": SAY, "ast.py": "x = 1"},
        ["main.py"],
    ),
    "shadow-added-late": (
        {
            "main.py": "import sys; sys.path.insert(0, 'lib'); import own, inspect; print(own.word, inspect.x)",
            "lib/own.py": SAY,
            "lib/inspect.py": "x = 1",
            "lib/tokenize.py": "",
        },
        ["main.py"],
    ),
    "optimized": ({"main.py": "import own; print(own.word, __debug__)", "own.py": SAY}, ["-O", "main.py"]),
    "isolated": ({"main.py": "print('plain')"}, ["-I", "main.py"]),
    "without-site": ({"main.py": "print('plain')"}, ["-S", "main.py"]),
}


@pytest.mark.parametrize("name", INSTRUMENTED)
def test_own_code_is_instrumented(name: str, tmp_path: Path) -> None:
    files, argv = INSTRUMENTED[name]
    plain = python(tmp_path, files, *argv)
    done = gemini(tmp_path, files, *argv)
    assert "plain" in plain.stdout
    assert done.stdout == plain.stdout.replace("plain", "instrumented")
    assert (done.stderr, done.code) == (plain.stderr, plain.code)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_processes_of_multiprocessing_run_instrumented_code(method: str, tmp_path: Path) -> None:
    main = (
        "import multiprocessing as mp\nimport own\n"
        "def work(queue): queue.put(('plain', own.word, __name__))\n"
        f"if __name__ == '__main__':\n    c = mp.get_context({method!r}); q = c.Queue()\n"
        "    p = c.Process(target=work, args=(q,)); p.start(); print(q.get()); p.join()\n"
    )
    files: Files = {"main.py": main, "own.py": SAY}
    for argv in (["main.py"], ["-m", "main"]):
        plain = python(tmp_path, files, *argv)
        done = gemini(tmp_path, files, *argv)
        assert done.stdout == plain.stdout.replace("plain", "instrumented")
        assert done.stderr == plain.stderr == ""


def test_installed_packages_are_left_alone_unless_named(tmp_path: Path) -> None:
    files: Files = {"main.py": "import sys; sys.path.append('site-packages'); import lib; print(lib.word)"}
    files |= {"site-packages/lib/__init__.py": SAY}
    assert gemini(tmp_path, files).stdout == "plain\n"
    assert gemini(tmp_path, files, "--instrument", "lib", "main.py").stdout == "instrumented\n"
    assert gemini(tmp_path, files, "--instrument=li", "main.py").stdout == "plain\n"


def test_caches_are_pythons_own_and_do_not_hide_instrumentation(tmp_path: Path) -> None:
    cached = "marshal.loads(open(own.__cached__, 'rb').read()[16:]).co_consts"
    files: Files = {
        "main.py": f"import own, marshal\nprint(own.word)\nprint('pla' + 'in' in {cached})",
        "own.py": SAY,
    }
    case = with_plugin("cache", files)
    folder = tmp_path / "project"
    assert run(GEMINI, case, folder).stdout == "instrumented\nTrue\n"
    assert run(GEMINI, case, folder, fresh=False).stdout == "instrumented\nTrue\n"
    assert run(PYTHON, case, folder, fresh=False).stdout == "plain\nTrue\n"


def test_a_pass_that_raises_costs_one_line(tmp_path: Path) -> None:
    files: Files = {
        "main.py": "'''break the pass'''\nimport own\nprint('plain', own.x)",
        "own.py": "x = 'break the pass'",
    }
    done = gemini(tmp_path, files)
    assert done.stdout == "instrumented break the pass\n"
    lines = done.stderr.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("gemini_python: ") and "KeyError" in line for line in lines)
    assert done.code == 0


def test_passes_are_chosen_by_name(tmp_path: Path) -> None:
    files: Files = {"main.py": "import own; print('plain', own.word)", "own.py": SAY}
    assert gemini(tmp_path, files, "--skip-pass", "shout", "main.py").stdout == "plain plain\n"
    assert gemini(tmp_path, files, "--passes", "shout", "main.py").stdout == "instrumented instrumented\n"
    assert gemini(tmp_path, files, "--no-gemini", "main.py").stdout == "plain plain\n"
    wrong = gemini(tmp_path, files, "--passes", "shuot", "main.py")
    assert wrong.code == 2
    assert "did you mean 'shout'?" in wrong.stderr
    assert wrong.stdout == ""


def test_tracebacks_show_the_users_text(tmp_path: Path) -> None:
    files: Files = {
        "main.py": "import own\ndef f(a, b): return own.g(a, 'plain' + b)\nf('plain', 'x' + own.h('plain', 1))\n",
        "own.py": "def h(a, b):\n    return ('plain' + a) / (b - 1) + 'plain'\n",
    }
    assert gemini(tmp_path, files).stderr == python(tmp_path, files).stderr


def test_tracing_sees_the_users_program_only(tmp_path: Path) -> None:
    main = (
        "import sys\nseen = set()\n"
        "def trace(frame, event, arg): seen.add(frame.f_code.co_filename); return trace\n"
        "sys.settrace(trace); sys.setprofile(trace)\nimport own\nsys.settrace(None); sys.setprofile(None)\n"
        "print([name for name in seen if 'gemini' in name and not name.endswith(('hook.py', 'ownership.py'))])\n"
    )
    assert gemini(tmp_path, {"main.py": main, "own.py": SAY}).stdout == "[]\n"


def test_a_program_with_its_own_gemini_runs_under_plain_python(tmp_path: Path) -> None:
    files: Files = {"main.py": "import gemini; print('plain', gemini.x)", "gemini.py": "x = 1"}
    done = gemini(tmp_path, files)
    assert done.stdout == "plain 1\n"
    assert "shadows the package gemini" in done.stderr
    assert gemini(tmp_path, files, "-q", "main.py").stderr == ""
    script: Files = {"gemini.py": "print('plain', __name__)"}
    assert gemini(tmp_path, script, "gemini.py").stdout == "plain __main__\n"
    folder: Files = {"main.py": "print('plain')", "gemini/results.txt": "no package"}
    assert gemini(tmp_path, folder).stdout == "instrumented\n"


def test_threads_may_import_at_once(tmp_path: Path) -> None:
    main = (
        "import importlib, threading\nstart = threading.Barrier(8)\n"
        "def load(n):\n    start.wait(); words[n] = importlib.import_module(f'own{n}').word\n"
        "words = {}\nthreads = [threading.Thread(target=load, args=(n,)) for n in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\nprint(set(words.values()), len(words))\n"
    )
    done = gemini(tmp_path, {"main.py": main, **{f"own{n}.py": SAY for n in range(8)}})
    assert (done.stdout, done.stderr) == ("{'instrumented'} 8\n", "")


def test_warnings_as_errors_do_not_reach_our_own_imports(tmp_path: Path) -> None:
    files: Files = {"main.py": "import own, warnings\nprint(own.word, warnings.filters[0][0])", "own.py": SAY}
    done = gemini(tmp_path, files, "-W", "error", "main.py")
    assert (done.stdout, done.stderr) == ("instrumented error\n", "")


def test_an_editable_install_is_the_users_own(tmp_path: Path) -> None:
    finder = (
        "import sys\nfrom importlib.util import spec_from_file_location\n"
        "class Finder:\n    @staticmethod\n    def find_spec(name, path=None, target=None):\n"
        "        if name == 'project':\n            return spec_from_file_location(name, 'src/project.py')\n"
        "sys.meta_path.append(Finder)\nimport project\nprint(project.word)\n"
    )
    assert gemini(tmp_path, {"main.py": finder, "src/project.py": SAY}).stdout == "instrumented\n"


def test_quiet_leaves_only_the_programs_own_output(tmp_path: Path) -> None:
    fake = "class Tensor: pass\nclass nn:\n    class Module: pass\ndef zeros(*_, device=None): return device\n"
    main = "import torch\nprint(torch.zeros(1, device='cuda'))"
    files: Files = {"main.py": main, "torch.py": fake + "class device: pass\n", "quiet.json": '{"quiet": true}'}
    assert "cuda:0 is not on this machine" in gemini(tmp_path, files).stderr
    for options in (["-q"], ["--config", "quiet.json"]):
        done = gemini(tmp_path, files, *options, "main.py")
        assert (done.stdout, done.stderr) == ("cpu\n", "")
