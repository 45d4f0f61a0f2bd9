"""Interpreter flags, environment variables and standard streams."""

# ruff: noqa: E501 - a program a line reads better than a program over many

from launching import Case, script

FLAGS = (
    "import sys, os\n"
    "print(sys.flags, sys.warnoptions, sys._xoptions, sys.dont_write_bytecode, sys.orig_argv[1:])\n"
    "print(__debug__, __doc__, sys.path, sys.argv)\nassert False, 'asserted'\n"
)


def flags(name: str, *words: str, **more: object) -> Case:
    return Case(name, [*words, "main.py", "-x", "y"], {"main.py": '"""Doc."""\n' + FLAGS}, **more)  # type: ignore[arg-type]


CASES = [
    flags("optimize", "-O"),
    flags("optimize-twice", "-OO"),
    flags("optimize-separately", "-O", "-O"),
    flags("unbuffered", "-u"),
    flags("no-bytecode", "-B"),
    flags("cluster", "-uBs"),
    flags("cluster-with-value", "-uBWerror"),
    flags("warnings", "-W", "error::DeprecationWarning", "-Wignore"),
    flags("x-options", "-X", "dev", "-Xutf8=0", "-X", "mine=3"),
    flags("isolated", "-I"),
    flags("no-environment", "-E", env={"PYTHONOPTIMIZE": "1", "PYTHONPATH": "/nowhere"}),
    flags("no-site", "-S"),
    flags("isolated-without-site", "-IS"),
    flags("no-user-site", "-s"),
    flags("bytes-warnings", "-bb"),
    flags("hash-based-pycs", "--check-hash-based-pycs", "always"),
    flags("hash-randomization", "-R"),
    flags("verbose-not", "-d"),
    Case("skip-first-line", ["-x", "main.py"], {"main.py": "this is not python\nprint('second line')\n1/0"}),
    Case("skip-first-line-in-cluster", ["-xB", "main.py", "-x"], {"main.py": "@echo off\nimport sys\nprint(sys.argv)"}),
    script("environment-optimize", FLAGS, env={"PYTHONOPTIMIZE": "2"}),
    script("environment-warnings", FLAGS, env={"PYTHONWARNINGS": "error"}),
    script("environment-path", FLAGS, env={"PYTHONPATH": "{}/lib"}),
    script("environment-dont-write", FLAGS, env={"PYTHONDONTWRITEBYTECODE": "1"}),
    script("environment-hash-seed", "print(hash('abc'))", env={"PYTHONHASHSEED": "42"}),
    script(
        "environment-encoding", "import sys\nprint(sys.stdout.encoding, '\xe4')", env={"PYTHONIOENCODING": "latin-1"}
    ),
    script("environment-utf8", FLAGS, env={"PYTHONUTF8": "1"}),
    script("environment-development", FLAGS, env={"PYTHONDEVMODE": "1"}),
    script(
        "environment-cache-prefix",
        "import sys; print(sys.pycache_prefix)",
        env={"PYTHONPYCACHEPREFIX": "/nowhere/cache", "PYTHONDONTWRITEBYTECODE": "1"},
    ),
    script("environment-recursion", "import sys; print(sys.getrecursionlimit())"),
    script(
        "locale-c",
        "import sys, os, locale\nprint(sys.flags.utf8_mode, os.environ.get('LC_CTYPE'), sys.getfilesystemencoding(), sys.stdout.encoding, sys.stdout.errors)",
        env={"LC_ALL": "", "LANG": "C", "LC_CTYPE": ""},
    ),
    script(
        "locale-posix-all",
        "import sys, os\nprint(sys.flags.utf8_mode, os.environ.get('LC_CTYPE'), sys.stdout.encoding)",
        env={"LC_ALL": "POSIX"},
    ),
    Case(
        "sitecustomize",
        ["main.py"],
        {
            "main.py": "import sys\nprint(sys.marker)",
            "lib/sitecustomize.py": "import sys\nsys.marker = 'set by the site'",
        },
        env={"PYTHONPATH": "{}/lib"},
    ),
    Case("inspect-after", ["-i", "main.py"], {"main.py": "x = 5\n"}, stdin="print(x, __name__)\n"),
    Case("inspect-after-raise", ["-i", "main.py"], {"main.py": "x = 5\n1/0\n"}, stdin="print(x)\n"),
    script(
        "stdin",
        "import sys\nprint(input('? '), sys.stdin.read().upper(), sys.stdin.isatty())",
        stdin="first\nsecond\nthird",
    ),
    script("stdin-bytes", "import sys\nprint(sys.stdin.buffer.read())", stdin="\x00\xff"),
    script("stdin-at-end", "input()"),
    script("stderr", "import sys\nprint('out'); print('err', file=sys.stderr); sys.stdout.write('no newline')"),
    script(
        "buffering",
        "import sys\nprint(sys.stdout.line_buffering, sys.stderr.line_buffering, sys.stdout.isatty(), sys.stdin.name, sys.stdout.name)",
    ),
    script(
        "subprocess",
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'import sys; print(sys.argv, sys.flags.optimize, [m for m in sys.modules if \"gemini.\" in m])', 'x'], capture_output=True, text=True))",
    ),
    script(
        "tracemalloc",
        "import tracemalloc\nprint(tracemalloc.is_tracing())\ntracemalloc.start(); x = [0]*1000; print(tracemalloc.get_traced_memory()[0] > 0)",
    ),
    script("gc", "import gc\nprint(gc.isenabled(), gc.get_threshold(), gc.get_debug(), gc.callbacks)"),
    script(
        "threads-at-start",
        "import threading\nprint(len(threading.enumerate()), threading.current_thread() is threading.main_thread(), threading.active_count())",
    ),
]
