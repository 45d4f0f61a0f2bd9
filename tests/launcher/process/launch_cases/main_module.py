"""The program's view of itself: `__main__`, `sys`, its stack, its source."""

# ruff: noqa: E501 - a program a line reads better than a program over many

from launching import Case, script

GLOBALS = """

# ruff: noqa: E501 - a program a line reads better than a program over many
'''The docstring.'''
import sys
print(__doc__)
for name, value in sorted(globals().items()):
    print(name, type(value).__name__, value if isinstance(value, (str, type(None))) else "")
print(sys.modules["__main__"].__dict__ is globals(), __builtins__ is sys.modules["builtins"])
print(sys.argv, sys.path[0], sys.orig_argv[1:], __loader__.__class__, getattr(__loader__, "path", None))
print(getattr(__loader__, "name", None), sys._xoptions, sys.flags, sys.warnoptions)
"""

CASES = [
    script("globals", GLOBALS, "a", "--b", "-c"),
    script("docstring", '"""Doc."""\nprint(__doc__, list(globals()))'),
    script(
        "docstring-and-future",
        '"""Doc."""\nfrom __future__ import annotations\nx: undefined = 1\nprint(__annotations__)',
    ),
    script("annotations", "x: int = 1\nprint(__annotations__)"),
    script("empty", ""),
    script("only-comments", "# nothing\n\n# here"),
    script("only-a-docstring", '"""Only."""'),
    script("order-of-globals", "print(list(globals()))"),
    Case("relative-path", ["./sub/../main.py", "x"], {"main.py": GLOBALS, "sub/x": ""}),
    Case("absolute-path", ["{}/main.py"], {"main.py": GLOBALS}),
    Case("double-dash", ["--", "main.py", "--", "-x"], {"main.py": GLOBALS}),
    script(
        "odd-arguments", "import sys; print(ascii(sys.argv))", "", " ", "ä", "\udcff", "--help", "--dump", "-m", "a=b"
    ),
    Case("odd-script-name", ["we ird-ñame.x.txt"], {"we ird-ñame.x.txt": GLOBALS}),
    Case("no-extension", ["tool"], {"tool": "#!/usr/bin/env python\n" + GLOBALS}),
    script(
        "stack",
        "import inspect, sys, warnings\n"
        "def f(): return [(i.function, i.lineno, i.filename, i.code_context) for i in inspect.stack()]\n"
        "print(f(), sys._getframe().f_back, len(inspect.stack()))\n"
        "warnings.warn('top', stacklevel=1)\nwarnings.warn('above', stacklevel=2)\n"
        "def g(): warnings.warn('in g', DeprecationWarning, stacklevel=2)\ng()",
    ),
    script(
        "source",
        "import inspect, sys, linecache\n"
        "class A:\n    '''A.'''\n    def f(self):\n        return 1  # one\n"
        "def deco(f): return f\n@deco\ndef g(): pass\n"
        "print(inspect.getsource(A), inspect.getsource(A.f), inspect.getsource(g), inspect.getsourcelines(g))\n"
        "print(inspect.getsource(sys.modules['__main__']), inspect.getmodule(A), inspect.getfile(g))\n"
        "print(linecache.getline(__file__, 3), g.__code__.co_filename, g.__code__.co_firstlineno, inspect.getcomments(g))",
    ),
    script(
        "pickle",
        "import pickle\nclass A:\n    def __eq__(self, o): return type(o) is A\n"
        "print(pickle.dumps(A()), pickle.loads(pickle.dumps(A())) == A(), A, A.__module__)",
    ),
    script(
        "doctest",
        '"""\n>>> 1 + 1\n3\n"""\ndef f():\n    """\n    >>> f()\n    7\n    """\n    return 7\nimport doctest\nprint(doctest.testmod())',
    ),
    script(
        "modules",
        "import sys\nfor name in ['ast', 'dataclasses', 'inspect', 'json', 'rich', 'torch', 'numpy', 'importlib.metadata', "
        "'multiprocessing', 'tokenize', 'typing', 'logging', 'argparse', 'linecache', 'traceback', 'subprocess', "
        "'threading', 'random', 'tempfile', 'signal', 'ctypes']:\n    print(name, name in sys.modules)",
    ),
    script(
        "import-system",
        "import sys, importlib.machinery as m\n"
        "print([getattr(f, '__name__', f.__class__.__name__) for f in sys.meta_path], len(sys.path_hooks), sys.path)\n"
        "print(m.SourceFileLoader.get_code.__qualname__, m.SourceFileLoader.get_code.__module__)",
    ),
    script(
        "descriptors",
        "import os\nprint(sorted(int(n) for n in os.listdir('/proc/self/fd') if int(n) < 20 and os.path.exists(f'/proc/self/fd/{n}')))\n"
        "print(sorted(k for k in os.environ), os.getcwd())",
    ),
    script("main-in-main", "import __main__\nprint(__main__.__file__ == __file__)\nx = 3\nprint(__main__.x)"),
    script(
        "import-self",
        "import sys\nprint(__name__)\nif __name__ == '__main__':\n    import main\n    print(main.__spec__.name, main is sys.modules['__main__'])",
    ),
    script("names-that-look-like-ours", "__gemini__ = 1\nPLAN = 2\nboot = 3\nprint(sorted(globals()))"),
    script(
        "settrace",
        (
            "import sys\nseen = []\n"
            "def trace(frame, event, arg):\n    seen.append((frame.f_code.co_name, event, frame.f_lineno)); return trace\n"
            "def f():\n    return 1\nsys.settrace(trace)\nf()\nsys.settrace(None)\nprint(seen)"
        ),
    ),
    script("pdb", "import pdb\nx = 5\nbreakpoint()\nprint('after', x)", stdin="p x\nwhere\nlist\nnext\ncontinue\n"),
    script("breakpoint-elsewhere", "breakpoint()\nprint('ok')", env={"PYTHONBREAKPOINT": "0"}),
    script(
        "recursion-depth",
        (
            "import sys\ndef depth(n=0):\n    try:\n        return depth(n + 1)\n    except RecursionError:\n        return n\n"
            "print(depth(), sys.getrecursionlimit())"
        ),
    ),
]
