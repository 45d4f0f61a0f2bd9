"""Forms of source text, valid and invalid."""

# ruff: noqa: E501 - a program a line reads better than a program over many

from launching import Case, script

CASES = [
    Case("latin-1", files={"main.py": "# coding: latin-1\nprint('\xe9', len('\xe9'))\n1/0 # \xe9".encode("latin-1")}),
    Case("byte-order-mark", files={"main.py": b"\xef\xbb\xbf'''doc'''\nprint(__doc__)\n1/0"}),
    Case("crlf", files={"main.py": b"x = '''a\r\nb'''\r\nprint(repr(x))\r\n1/0\r\n"}),
    Case("carriage-returns", files={"main.py": b"x = 1\rprint(x)\r1/0\r"}),
    Case("form-feed", files={"main.py": b"x = 1\n\x0c\nprint(x)\n1/0"}),
    Case("undecodable", files={"main.py": b"print('\xff')\n"}),
    Case("unknown-encoding", files={"main.py": b"# coding: klingon\nprint(1)\n"}),
    Case("wrong-encoding-in-bom", files={"main.py": b"\xef\xbb\xbf# coding: latin-1\nprint(1)\n"}),
    script("tabs", "if True:\n\tprint(1)\n\tif 1:\n\t\tprint(2)"),
    script("inconsistent-tabs", "if True:\n\tprint(1)\n        print(2)"),
    script("syntax-error", "print('before')\ndef f(:\n    pass"),
    script("syntax-error-late", "x = 1\ndef f():\n    return 1\nreturn 2"),
    script("syntax-error-future", "import os\nfrom __future__ import annotations"),
    script("syntax-error-unknown-future", "from __future__ import braces"),
    script("syntax-error-nonlocal", "def f():\n    nonlocal x"),
    script("syntax-error-unclosed", "x = (1,\n2"),
    script("syntax-error-await", "await x"),
    script("syntax-error-indent", "def f():\npass"),
    script("syntax-error-string", "x = 'abc\nprint(x)"),
    script("syntax-error-wide", "é = 😀 + 1"),
    script("syntax-error-star", "*a = 1\nprint(*)"),
    script("syntax-error-duplicate-argument", "def f(a, a): pass"),
    script("syntax-warning-is", "x = 1\nif x is 1: print('is')\nassert (x, 'y')"),
    script("syntax-warning-escape", "import re\nprint('\\d')\n"),
    Case("syntax-warning-as-error", ["-W", "error", "main.py"], {"main.py": "x = 1\nprint('before')\nx is 1\n"}),
    Case("escape-warning-shown", ["-W", "default", "main.py"], {"main.py": "x = '\\d'\nprint(1)\n"}),
    Case("escape-warning-as-error", ["-Werror", "main.py"], {"main.py": "x = '\\d'\nprint(1)\n"}),
    script(
        "future-annotations", "from __future__ import annotations\ndef f(x: y) -> z: pass\nprint(f.__annotations__)"
    ),
    script(
        "future-several",
        "'doc'\nfrom __future__ import annotations, division\nfrom __future__ import generator_stop; x = 1\nprint(x, annotations)",
    ),
    script(
        "future-leaks-not",
        "print(compile('def f(x: y): pass', '', 'exec').co_flags)\ndef f(x: int): pass\nprint(f.__annotations__)",
    ),
    script(
        "async",
        "import asyncio\nasync def g():\n    yield 1\nasync def main():\n    async for x in g(): print(x)\n    return [i async for i in g()]\nprint(asyncio.run(main()))",
    ),
    script(
        "decorators",
        "def d(n):\n    def w(f):\n        print(n, f.__name__)\n        return f\n    return w\n@d(1)\n@d(2)\nclass A: pass\n@d(3)\ndef f(): pass",
    ),
    script("match", "match [1, 2]:\n    case [x, y]: print(x, y)"),
    script(
        "walrus-and-friends", "print([y := 1, y**2], (lambda a, /, b, *, c: (a, b, c))(1, 2, c=3), f'{y=} {y!r:>4}')"
    ),
    script(
        "except-star",
        "try:\n    raise ExceptionGroup('', [ValueError()])\nexcept* ValueError as e: print(e.exceptions)",
        since=(3, 11),
    ),
    script(
        "type-statement", "type X[T] = list[T]\nprint(X)\ndef f[T](x: T) -> T: return x\nprint(f(1))", since=(3, 12)
    ),
    script("nested-fstring", "x = 'a'\nprint(f'{x + f\"{x}\"}')"),
    script("one-line", "import sys; x = 1; print(x); sys.exit(x)"),
    script("semicolon-after-docstring", "'doc'; print(__doc__)"),
    script("bytes-docstring", "b'not doc'\nprint(__doc__)"),
    script("fstring-docstring", "f'not doc'\nprint(__doc__)"),
    script("long-line", "x = '" + "a" * 70000 + "'\nprint(len(x))"),
    script("many-constants", "x = [" + ", ".join(map(str, range(5000))) + "]\nprint(sum(x))"),
    script("deep-nesting", "x = " + "(" * 60 + "1" + ")" * 60 + "\nprint(x)"),
    script("too-deep-nesting", "x = " + "(" * 250 + "1" + ")" * 250 + "\nprint(x)"),
    script("deep-expression", "x = " + "+".join(["1"] * 3000) + "\nprint(x)"),
    script("line-continuation", "x = 1 + \\\n    2\nprint(x)\nassert x == 4, \\\n    'four'"),
    script("lone-surrogate-escape", "print(ascii('\\udc80'), len('\\U0001F600'))"),
    script("nfkc-names", "ﬁ = 1\nprint(fi)"),
    script(
        "class-private-names",
        "class A:\n    __x = 1\n    def f(self): return self.__x\nprint(A().f(), [n for n in vars(A) if 'x' in n])",
    ),
    script("del-builtins", "import builtins\nprint(len(dir(builtins)))\nprint = 3\ndel print\nprint('back')"),
    script("shadow-exec", "exec = __import__ = marshal = None\nprint('fine')"),
    script("global-exec", "exec('y = 1'); print(y); exec(compile('z = 2', 'f', 'exec')); print(z, eval('z'))"),
    script(
        "code-object",
        "import sys\nc = sys._getframe().f_code\nprint(c.co_name, c.co_filename, c.co_firstlineno, c.co_varnames, c.co_flags, c.co_freevars)",
    ),
]
