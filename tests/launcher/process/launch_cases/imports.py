"""Ways in which a user module is found, loaded, reloaded or fails to import."""

# ruff: noqa: E501 - a program a line reads better than a program over many

import io
import zipfile

from launching import Case, script

SHOW = (
    "def show(m):\n"
    "    s = m.__spec__\n"
    "    print(m.__name__, m.__package__, getattr(m, '__file__', None), getattr(m, '__cached__', None), type(m.__loader__))\n"
    "    print(s.name, s.origin, s.cached, s.has_location, s.submodule_search_locations, s.parent, s.loader is m.__loader__)\n"
)

PACKAGE: dict[str, str | bytes] = {
    "pkg/__init__.py": "from .a import f\n__all__ = ['b']\n",
    "pkg/a.py": "from . import b\nfrom .sub.deep import d\ndef f(): return b.x + d\n",
    "pkg/b.py": "x = 1\n_hidden = 2\n",
    "pkg/sub/__init__.py": "",
    "pkg/sub/deep.py": "from .. import b\nfrom ..b import *\nd = x + 1\n",
    "pkg/data.txt": "some data",
    "space/one.py": "v = 'one'",
    "elsewhere/space/two.py": "v = 'two'",
    "star.py": "__all__ = ['p', '_q']\np = 1\n_q = 2\nr = 3\n",
    "raises.py": "def g():\n    return 1 / 0\n\nx = g()\n",
    "badsyntax.py": "x = 1\ny = = 2\n",
    "circular_a.py": "import circular_b\nx = 1\n",
    "circular_b.py": "from circular_a import x\n",
    "lazy.py": "value = 'lazy'\n",
    "noisy.py": "import sys, inspect\nprint('frames', [f.function for f in inspect.stack()])\n",
    "dynamic.py": "def __getattr__(name): return name.upper()\n",
    "escapes.py": "x = '\\d'\ny = 1 is 1\n",
}


def project(name: str, text: str, **more: object) -> Case:
    files = {**PACKAGE, "main.py": SHOW + text, **more.pop("files", {})}  # type: ignore[dict-item]
    return Case(name, ["main.py"], files, **more)  # type: ignore[arg-type]


def _zip() -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as file:
        file.writestr("zipped.py", "v = 'zipped'\ndef f(): 1/0\n")
    return data.getvalue()


CASES = [
    project("package", "import pkg, pkg.sub.deep\nprint(pkg.f())\nshow(pkg); show(pkg.a); show(pkg.sub.deep)"),
    project("star", "from star import *\nprint(p, _q, 'r' in globals())\nfrom pkg import *\nprint(b.x)"),
    project(
        "namespace",
        "import sys\nsys.path.append('elsewhere')\nimport space.one, space.two\nprint(space.one.v, space.two.v, space.__path__, space.__spec__.origin)",
    ),
    project("lazy", "def f():\n    import lazy\n    return lazy\nshow(f())"),
    project(
        "import-module",
        "import importlib\nshow(importlib.import_module('lazy'))\nshow(importlib.import_module('.b', 'pkg'))",
    ),
    project(
        "reload",
        "import importlib, lazy, os, time\nopen('lazy.py', 'w').write('value = \"a new value\"\\n')\nprint(importlib.reload(lazy).value)\nshow(lazy)",
    ),
    project("import-raises", "import raises"),
    project(
        "raises-caught",
        "try:\n    import raises\nexcept ZeroDivisionError as e:\n    import traceback\n    traceback.print_exc()\n    tb = e.__traceback__\n    while tb:\n        print(tb.tb_frame.f_code.co_filename, tb.tb_lineno)\n        tb = tb.tb_next",
    ),
    project("import-syntax-error", "import badsyntax"),
    project(
        "import-syntax-error-caught",
        "try:\n    import badsyntax\nexcept SyntaxError as e:\n    print(e, e.filename, e.lineno, e.offset, e.text)\n    import traceback; traceback.print_exc()",
    ),
    project("missing", "import nope"),
    project("missing-name", "from pkg import nope"),
    project("missing-submodule", "import pkg.nope"),
    project("circular", "import circular_a"),
    project("beyond-top", "from .. import x"),
    project("relative-in-script", "from . import lazy"),
    project("frames-during-import", "import noisy"),
    project("module-getattr", "import dynamic\nfrom dynamic import abc\nprint(abc, dynamic.xyz)"),
    project("warnings-while-compiling", "import escapes\nprint(escapes.x)"),
    project(
        "warnings-shown-once",
        "import warnings\ndef w(): warnings.warn('once')\nw()\nimport lazy, escapes\nw()\nimport pkg\nw()",
    ),
    project(
        "source-of-modules", "import inspect, pkg.b, lazy\nprint(inspect.getsource(pkg.a.f), inspect.getsource(lazy))"
    ),
    project(
        "resources",
        "from importlib import resources\nprint(resources.files('pkg').joinpath('data.txt').read_text())\nimport pkgutil, pkg\nprint(pkgutil.get_data('pkg', 'data.txt'), sorted(m.name for m in pkgutil.walk_packages(pkg.__path__, 'pkg.')))\nprint(sorted(m.name for m in pkgutil.iter_modules(['.'])))",
    ),
    project(
        "loader-api",
        "import lazy\nl = lazy.__loader__\nprint(l.get_source('lazy'), l.get_code('lazy').co_filename, l.is_package('lazy'), l.get_filename('lazy'), l.path, l.name, l.path_stats(l.path)['size'])",
    ),
    project(
        "spec-from-file",
        "import importlib.util\ns = importlib.util.spec_from_file_location('other_name', 'pkg/b.py')\nm = importlib.util.module_from_spec(s)\ns.loader.exec_module(m)\nshow(m); print(m.x)",
    ),
    project("run-path", "import runpy\nprint(runpy.run_path('lazy.py')['value'], runpy.run_module('pkg.b')['x'])"),
    project("run-path-raises", "import runpy\nrunpy.run_path('raises.py', run_name='__main__')"),
    project("run-path-syntax-error", "import runpy\nrunpy.run_path('badsyntax.py')"),
    project("run-path-missing", "import runpy\nrunpy.run_path('nope.py')"),
    project(
        "zip-on-path",
        "import sys\nsys.path.insert(0, 'lib.zip')\nimport zipped\nprint(zipped.v, type(zipped.__loader__), zipped.__file__)\nzipped.f()",
        files={"lib.zip": _zip()},
    ),
    project(
        "sourceless",
        "import py_compile, os\npy_compile.compile('lazy.py', 'bare.pyc')\nimport bare\nprint(bare.value, type(bare.__loader__), bare.__cached__)",
    ),
    project(
        "cache-is-pythons-own",
        "import lazy, marshal\nprint(marshal.loads(open(lazy.__cached__, 'rb').read()[16:]).co_consts)\nimport os; print(sorted(os.listdir('__pycache__')))",
    ),
    project(
        "stale-cache",
        "import lazy, importlib, os\nopen('lazy.py', 'w').write('value = \"newer and longer\"')\nimportlib.invalidate_caches()\nimport sys; del sys.modules['lazy']\nimport lazy; print(lazy.value)",
    ),
    project(
        "broken-cache",
        "import os, importlib.util as u\nos.makedirs('__pycache__')\nopen(u.cache_from_source('lazy.py'), 'wb').write(u.MAGIC_NUMBER + b'x')\nimport lazy; print(lazy.value)",
    ),
    project(
        "own-import-hook",
        "import sys\nclass F:\n    def find_spec(self, name, path=None, target=None):\n        print('asked', name)\nsys.meta_path.insert(0, F())\nimport lazy, pkg.b",
    ),
    project(
        "own-loader",
        "import sys, importlib.machinery as m, importlib.util as u\nclass L(m.SourceFileLoader):\n    def source_to_code(self, data, path, *, _optimize=-1):\n        return super().source_to_code(data.replace(b'lazy', b'mine'), path)\ns = u.spec_from_file_location('lazy', 'lazy.py', loader=L('lazy', 'lazy.py'))\nx = u.module_from_spec(s); s.loader.exec_module(x); print(x.value)",
    ),
    project(
        "import-in-threads",
        "import threading, importlib\ndef f(n): importlib.import_module(n)\nts = [threading.Thread(target=f, args=(n,)) for n in ('lazy', 'pkg.sub.deep', 'star', 'dynamic')]\n[t.start() for t in ts]; [t.join() for t in ts]\nimport sys; print(sorted(n for n in sys.modules if n.startswith(('lazy', 'pkg', 'star'))))",
    ),
    project(
        "path-changes",
        "import sys, os\nsys.path.insert(0, os.path.join(sys.path[0], 'elsewhere'))\nimport space.two; print(space.two.v)",
    ),
    project("chdir", "import os\nos.chdir('elsewhere')\nimport lazy; print(lazy.value, __file__)"),
    Case(
        "shadow-types",
        ["main.py"],
        {
            "main.py": "import types\nprint(types.__file__ if hasattr(types, 'mine') else 'library')",
            "types.py": "mine = 1",
        },
    ),
    Case(
        "shadow-ast",
        ["main.py"],
        {
            "main.py": "import ast, helper\nprint(ast.__file__, ast.mine)\n",
            "ast.py": "mine = 1",
            "helper.py": "import torchlike\n",
            "torchlike.py": "torch = 1\nimport dataclasses_ as d",
            "dataclasses_.py": "import ast\nprint(ast.mine)",
        },
    ),
    Case(
        "shadow-several",
        ["main.py"],
        {
            "main.py": "import inspect, tokenize, dis, token\nfor m in (inspect, tokenize, dis, token): print(m.__file__, m.mine)\nimport runpy, posix, marshal",
            **{
                f"{n}.py": "mine = 1  # torch" for n in ("inspect", "tokenize", "dis", "token", "dataclasses", "bisect")
            },
        },
    ),
    Case("shadow-package", ["main.py"], {"main.py": "import json\nprint(json.mine)", "json/__init__.py": "mine = 1"}),
    Case(
        "shadow-in-pythonpath",
        ["main.py"],
        {"main.py": "import ast\nprint(ast.mine)", "lib/ast.py": "mine = 1"},
        env={"PYTHONPATH": "{}/lib"},
    ),
    Case(
        "shadow-in-working-directory",
        ["-m", "main"],
        {"main.py": "import dataclasses\nprint(dataclasses.mine)", "dataclasses.py": "mine = 1"},
    ),
    Case(
        "script-named-types",
        ["types.py"],
        {"types.py": "print(__name__, __file__)\nimport types\nprint(types.__name__)"},
    ),
    Case(
        "script-named-ast",
        ["ast.py"],
        {"ast.py": "print(__name__)\nif __name__ == '__main__':\n    import ast\n    print(ast.__file__)"},
    ),
    Case("script-named-marshal", ["marshal.py"], {"marshal.py": "import marshal\nprint(marshal)"}),
    Case(
        "safe-path",
        ["-P", "main.py"],
        {"main.py": "import sys; print(sys.path[0])\nimport lazy", "lazy.py": ""},
        since=(3, 11),
    ),
    Case(
        "safe-path-environment", ["main.py"], {"main.py": "import sys; print(sys.path)\n"}, env={"PYTHONSAFEPATH": "1"}
    ),
    script("sys-path", "import sys; print(sys.path)"),
    Case(
        "another-torch",
        ["main.py"],
        {
            "main.py": "import torch\nprint(torch.device('cuda'), torch.zeros(1, device='cuda'), torch.X().cuda())",
            "torch.py": "def device(*a): return a\ndef zeros(*a, **k): return a, k\nclass X:\n    def cuda(self): return 3",
        },
    ),
    script("reserved-name", "__gemini__ = 5\nclass M:\n    def cuda(self): return __gemini__\nprint(M().cuda())"),
]
