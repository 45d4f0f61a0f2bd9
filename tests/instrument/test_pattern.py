"""Declarative passes: before and after, and errors that point at what is wrong."""

# ruff: noqa: E501  (before and after read best side by side)

import pytest
from assert_pass import assert_pass

from gemini.errors import PatternError
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.pattern import Rewrite
from gemini.instrument.text.source_file import SourceFile

LINEAR = Rewrite("torch.nn.Linear($args)", "mylib.Linear($args)")
LAYERS = Rewrite("torch.nn.Linear($args)", "mylib.layers.Linear($args, tracked=True)")
ADD = Rewrite("torch.add($x, $y)", "$x + $y")
IMPORTED = '__import__("mylib").Linear'
DEEP = '__import__("mylib.layers", fromlist=["__name__"]).Linear'

REWRITES = {
    "all arguments": (
        LINEAR,
        "from torch import nn as N\nx = N.Linear(3, # in\n   4, # out\n   bias=True,\n)\ny = N.Linear(*a, **b)\nz = N.Linear()\n",
        f"from torch import nn as N\nx = {IMPORTED}(3, # in\n   4, # out\n   bias=True,\n)\ny = {IMPORTED}(*a, **b)\nz = {IMPORTED}()\n",
    ),
    "aliases": (
        LINEAR,
        "from torch.nn import Linear as L\nM = L\nx = M(1, 2)\n",
        f"from torch.nn import Linear as L\nM = L\nx = {IMPORTED}(1, 2)\n",
    ),
    "another name of the same": (
        LINEAR,
        "from torch.nn.modules.linear import Linear\nx = Linear(1)\n",
        f"from torch.nn.modules.linear import Linear\nx = {IMPORTED}(1)\n",
    ),
    "pattern by another name": (
        Rewrite("torch.nn.modules.linear.Linear($args)", "mylib.Linear($args)"),
        "from torch.nn import Linear\nx = Linear(1)\n",
        f"from torch.nn import Linear\nx = {IMPORTED}(1)\n",
    ),
    "not on spelling": (LINEAR, "import torch\ndef f(torch, nn, Linear):\n  torch.nn.Linear(1); nn.Linear(2); Linear(3)\n",) * 1
    + ("import torch\ndef f(torch, nn, Linear):\n  torch.nn.Linear(1); nn.Linear(2); Linear(3)\n",),
    "more arguments": (
        LAYERS,
        "from torch.nn import Linear\nx = Linear(1, # a\n  2,)\ny = Linear()\nz = Linear(i for i in Linear(2))\n",
        f"from torch.nn import Linear\nx = {DEEP}(1, # a\n  2, tracked=True)\ny = {DEEP}(tracked=True)\n"
        f"z = {DEEP}((i for i in {DEEP}(2, tracked=True)), tracked=True)\n",
    ),
    "one expression a hole": (
        ADD,
        "import torch\ny = 2 * torch.add(a if b else c, -d)\n",
        "import torch\ny = 2 * ((a if b else c) + (-d))\n",
    ),
    "nested matches": (
        ADD,
        "import torch\ny = torch.add(torch.add(a, b), c)\n",
        "import torch\ny = ((a + b) + c)\n",
    ),
    "over lines": (ADD, "import torch\ny = torch.add(a,\n  # why\n  b)\n", "import torch\ny = (a + \n\nb)\n"),
    "the same twice": (
        Rewrite("torch.add($x, $x)", "2 * $x"),
        "import torch\nx = torch.add(a.b, a.b)\ny = torch.add(a, b)\n",
        "import torch\nx = (2 * a.b)\ny = torch.add(a, b)\n",
    ),
    "methods": (
        Rewrite("$model.cuda($args)", "__gemini__.cuda($model, $args)"),
        "import torch\nx = (a + b).cuda(0)\ny = a.cuda()\nz = a.b(1).cuda(device=2)\n",
        "import gemini.managed as __gemini__; import torch\nx = __gemini__.cuda(a + b, 0)\ny = __gemini__.cuda(a)\n"
        "z = __gemini__.cuda(a.b(1), device=2)\n",
    ),
    "anything": (
        Rewrite("torch.compile($f, mode=$_)", "$f"),
        "import torch\nx = torch.compile(net, mode='x')\ny = torch.compile(net)\nz = torch.compile(a + b, mode=1)\n",
        "import torch\nx = net\ny = torch.compile(net)\nz = (a + b)\n",
    ),
    "named arguments in any order": (
        Rewrite("torch.load($f, $args, map_location=$m)", "mylib.load($f, $m, $args)"),
        "import torch\na = torch.load(p, map_location=d)\nb = torch.load(p, weights_only=True, map_location=d)\n",
        'import torch\na = __import__("mylib").load(p, d)\nb = __import__("mylib").load(p, d, weights_only=True)\n',
    ),
    "constants": (
        Rewrite('torch.device("cuda")', 'torch.device("cpu")'),
        "import torch\na = torch.device('cuda')\nb = torch.device('cuda:0')\n",
        'import torch\na = __import__("torch").device("cpu")\nb = torch.device(\'cuda:0\')\n',
    ),
    "a name alone": (
        Rewrite("torch.float16", "torch.bfloat16"),
        "import torch as t\nx.to(t.float16, t.float32)\n",
        'import torch as t\nx.to(__import__("torch").bfloat16, t.float32)\n',
    ),
    "builtins": (
        Rewrite("print($args)", "logging.info($args)"),
        "print('a')\ndef f(print): print('b')\n",
        "__import__(\"logging\").info('a')\ndef f(print): print('b')\n",
    ),
    "to a builtin": (Rewrite("torch.add($x, $y)", "max($x, $y)"), "import torch\nx = torch.add(a, b)\n", "import torch\nx = max(a, b)\n"),
    "to a shadowed builtin": (
        Rewrite("torch.add($x, $y)", "max($x, $y)"),
        "import torch\nmax = 3\nx = torch.add(a, b)\n",
        'import torch\nmax = 3\nx = __import__("builtins").max(a, b)\n',
    ),
    "names of the replacement's own": (
        Rewrite("torch.add($x, $y)", "(lambda a, b: a.c + b)($x, $y)"),
        "import torch\nx = torch.add(a, b)\n",
        "import torch\nx = (lambda a, b: a.c + b)(a, b)\n",
    ),
    "a module said": (
        Rewrite("torch.add($args)", "mylib.Factory.make($args)", module="mylib"),
        "import torch\nx = torch.add(a, b)\n",
        'import torch\nx = __import__("mylib").Factory.make(a, b)\n',
    ),
    "dollar in a string": (
        Rewrite("torch.add($x, '$x')", "$x"),
        "import torch\nx = torch.add(a, '$x') + torch.add(a, 'x')\n",
        "import torch\nx = a + torch.add(a, 'x')\n",
    ),
    "in an f-string": (LINEAR, "from torch.nn import Linear\nx = f'{Linear(1)}'\n", f"from torch.nn import Linear\nx = f'{{{IMPORTED}(1)}}'\n"),
    "multi-line strings": (
        Rewrite("torch.add($x, $y)", "$x.y($y)"),
        "import torch\nx = torch.add('a'\n  'b', c)\n",
        "import torch\nx = ('a'\n  'b').y(c)\n",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("rewrite", "before", "after"), REWRITES.values(), ids=REWRITES.keys())
def test_rewrite(rewrite: Rewrite, before: str, after: str) -> None:
    assert_pass(rewrite, before, after)


WRONG = {
    "unclosed": ("torch.f($x", "1", "'(' was never closed\n    torch.f($x\n           ^\n"),
    "two expressions": ("torch.f($x); 2", "1", "invalid syntax\n    torch.f($x); 2\n               ^\n"),
    "statement": ("x = 1", "2", "cannot be used: "),
    "empty": ("  ", "2", "the pattern is empty"),
    "only a hole": ("$x", "1", "a single hole matches everything\n    $x\n    ^^\n"),
    "hole without name": ("torch.f($)", "1", "a hole has no name\n    torch.f($)\n            ^\n"),
    "unknown hole": ("torch.f($model)", "g.f($modle)", "no hole $modle\n    g.f($modle)\n        ^^^^^^\n    → did you mean 'model'"),
    "unnamed hole back": ("torch.f($_)", "g.f($_)", "$_ is not retained"),
    "unqualified": ("foo($x)", "$x", "'foo' is neither a builtin nor a name in a module\n    foo($x)\n    ^^^\n"),
    "unqualified replacement": ("torch.f($x)", "foo($x)", "'foo' is neither a builtin nor a name in a module\n    foo($x)\n    ^^^\n"),
    "args first": ("torch.f($args, $x)", "1", "$args takes all remaining arguments"),
    "args starred": ("torch.f(*$args)", "1", "$args already stands for"),
    "args outside": ("torch.f[$args]", "1", "$args stands for the arguments of a call"),
    "args alone": ("torch.f($args)", "$args", "the replacement cannot be used: $args stands for"),
}  # fmt: skip


@pytest.mark.parametrize(("pattern", "replacement", "message"), WRONG.values(), ids=WRONG.keys())
def test_errors_point_at_the_fault(pattern: str, replacement: str, message: str) -> None:
    with pytest.raises(PatternError) as raised:
        Rewrite(pattern, replacement)
    assert message in str(raised.value)
    assert "\n    → " in str(raised.value)


def test_a_rewritten_file_runs() -> None:
    text = "import math\nfrom math import sqrt as s\nx = [s(\n  4), math.sqrt(9)]\n"
    done = PassManager([Rewrite("math.sqrt($x)", "operator.neg($x)")]).run(SourceFile.from_text(text))
    scope: dict = {}
    exec(done.code(), scope)
    assert scope["x"] == [-4, -9]
    assert set(scope) == {"__builtins__", "math", "s", "x"}


def test_triggers_are_what_a_file_must_mention() -> None:
    assert LINEAR.triggers == ("torch", "Linear")
    assert Rewrite("$x.cuda($args)", "$x").triggers == ("cuda",)
    assert LINEAR.name == "rewrite torch.nn.Linear($args)"
    assert LINEAR.description == "torch.nn.Linear($args) → mylib.Linear($args)"
