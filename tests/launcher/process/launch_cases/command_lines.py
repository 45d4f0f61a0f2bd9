"""All kinds of programs that `python` runs: files, folders, archives, modules, commands, standard input."""

import io
import zipfile

from launching import Case

SHOW = (
    "import sys, inspect\n"
    "print(__name__, __package__, __spec__ and __spec__.name, __file__, __cached__, __doc__)\n"
    "print(sys.argv, sys.path[0], sys.orig_argv[1:], [(f.function, f.lineno, f.filename) for f in inspect.stack()])\n"
)
TAIL = "import atexit\natexit.register(lambda: print('at exit', __file__, __name__))\n"


def archive(**files: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        for name, text in files.items():
            file.writestr(zipfile.ZipInfo(name + ".py"), text)
    return data.getvalue()


COMMAND = "import sys\nprint(sys.argv, sorted(globals()), sys.path[0], __loader__, sys.orig_argv[1:])\n"
PACKAGE: dict[str, str | bytes] = {
    "pkg/__init__.py": "print('init', __name__, __package__)",
    "pkg/__main__.py": SHOW + "from . import other\nfrom .other import x\nprint(x)\n" + TAIL,
    "pkg/other.py": "x = 'other'",
    "pkg/tool.py": SHOW + TAIL + "def f():\n    raise ValueError('x')\nf()",
    "pkg/exits.py": "import sys\n" + TAIL + "sys.exit(5)",
    "pkg/bad.py": "x = (\n",
    "broken/__init__.py": "def f():\n    1 / 0\nf()",
    "broken/tool.py": "",
    "space/tool.py": SHOW,
}

CASES = [
    Case("module-package", ["-m", "pkg", "a", "-b"], PACKAGE),
    Case("module-attached", ["-mpkg", "a"], PACKAGE),
    Case("module-raises", ["-m", "pkg.tool", "--x"], PACKAGE),
    Case("module-exits", ["-m", "pkg.exits"], PACKAGE),
    Case("module-syntax-error", ["-m", "pkg.bad"], PACKAGE),
    Case("module-in-broken-package", ["-m", "broken.tool"], PACKAGE),
    Case("module-in-namespace-package", ["-m", "space.tool"], PACKAGE),
    Case("module-missing", ["-m", "nope"], PACKAGE),
    Case("module-missing-in-package", ["-m", "pkg.nope"], PACKAGE),
    Case("module-package-without-main", ["-m", "space"], PACKAGE),
    Case("module-with-py", ["-m", "pkg.py"], PACKAGE),
    Case("module-of-the-library", ["-m", "json.tool"], {}, stdin='{"a": 1}'),
    Case("module-this", ["-m", "this"]),
    Case("module-timeit", ["-m", "timeit", "-n1", "-r1", "raise KeyError(1)"]),
    Case("module-safe-path", ["-P", "-m", "pkg"], PACKAGE, since=(3, 11)),
    Case("module-pdb", ["-m", "pdb", "main.py"], {"main.py": "x = 1\nprint(x)\n"}, stdin="next\nnext\np x\nquit\n"),
    Case("module-doctest", ["-m", "doctest", "main.py"], {"main.py": '"""\n>>> 1\n2\n"""\n'}),
    Case("module-cprofile", ["-m", "trace", "--listfuncs", "main.py"], {"main.py": "def f(): pass\nf()\n"}),
    Case("module-frozen-off", ["-X", "frozen_modules=off", "-m", "pkg.tool"], PACKAGE, since=(3, 11)),
    Case(
        "directory",
        ["app", "x"],
        {"app/__main__.py": SHOW + "import side\n" + TAIL + "1/0", "app/side.py": "print('side')"},
    ),
    Case("directory-here", ["."], {"__main__.py": SHOW}),
    Case("directory-without-main", ["app"], {"app/x.py": ""}),
    Case("directory-isolated", ["-I", "app"], {"app/__main__.py": SHOW}),
    Case("zip", ["app.pyz", "x"], {"app.pyz": archive(__main__=SHOW + "import side\n1/0", side="print('side')")}),
    Case("zip-with-a-shebang", ["app"], {"app": b"#!/usr/bin/env python\n" + archive(__main__=SHOW)}),
    Case("zip-without-main", ["app.zip"], {"app.zip": archive(other="")}),
    Case("command", ["-c", COMMAND + "def f():\n    1/0\nf()", "a", "-b"]),
    Case("command-attached", ["-cimport sys; print(sys.argv)", "x"]),
    Case("command-in-cluster", ["-Bc", "import sys; print(sys.flags)"]),
    Case("command-empty", ["-c", ""]),
    Case("command-syntax-error", ["-c", "x ="]),
    Case("command-non-ascii", ["-c", "print('ä€😀')"]),
    Case("command-undecodable", ["-c", "print('\udcff')"]),
    Case("command-reads-input", ["-c", "import sys; print(sys.stdin.read())"], stdin="hello\n"),
    Case("stdin-dash", ["-", "a"], stdin=COMMAND + "print(__file__, repr(sys.stdin.read()))\n1/0\n"),
    Case("stdin-bare", [], stdin=COMMAND + "print(__file__, repr(sys.stdin.read()))\n"),
    Case("stdin-syntax-error", ["-"], stdin="print(1)\nx = = 2\n"),
    Case("stdin-empty", ["-"], stdin=""),
    Case("stdin-encoding", ["-"], stdin="# -*- coding: utf-8 -*-\nprint('ä')\n"),
    Case("missing-script", ["nope.py"]),
    Case("missing-script-in-folder", ["no/nope.py", "x"]),
    Case("missing-script-absolute", ["/nope/nope.py"]),
    Case("script-with-slash", ["main.py/"], {"main.py": "print(1)"}),
    Case("empty-name", [""]),
    Case("not-python", ["data"], {"data": bytes(range(256))}),
    Case("null-bytes", ["main.py"], {"main.py": b"print(1)\n\0\n"}),
]
