"""A name resolves to the framework's object exactly where it cannot be anything else."""

# ruff: noqa: E501  (one program a line reads better than one a paragraph)

import ast
import textwrap

import pytest

from gemini.instrument.names.qualified_names import Names


def uses(tree: ast.Module) -> list[ast.expr]:
    """The arguments of the calls `USE(…)`, in order of position."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "USE"]
    return [call.args[0] for call in sorted(calls, key=lambda call: (call.lineno, call.col_offset))]


def resolved(text: str, **options: object) -> list[str | None]:
    tree = ast.parse(textwrap.dedent(text))
    names = Names(tree, **options)  # type: ignore[arg-type]
    return [names.resolve(use) for use in uses(tree)]


RESOLVES = {
    "plain import": ("import torch; USE(torch.device)", "torch.device"),
    "import of a submodule binds the top": ("import torch.nn; USE(torch.nn.Linear)", "torch.nn.Linear"),
    "submodule with alias": ("import torch.nn.functional as F; USE(F.relu)", "torch.nn.functional.relu"),
    "from import": ("from torch import device; USE(device)", "torch.device"),
    "from import with alias": ("from torch import nn as N; USE(N.Linear)", "torch.nn.Linear"),
    "rebinding": ("from torch import nn\nL = nn.Linear\nUSE(L)", "torch.nn.Linear"),
    "rebinding twice": ("import torch as t\nn = t.nn\nL = n.Linear\nUSE(L)", "torch.nn.Linear"),
    "chained targets": ("import torch\na = b = torch.nn\nUSE(b.Linear)", "torch.nn.Linear"),
    "unpacked": ("from torch import nn\nA, B = nn.Linear, nn.ReLU\nUSE(B)", "torch.nn.ReLU"),
    "annotated": ("from torch import nn\nL: type = nn.Linear\nUSE(L)", "torch.nn.Linear"),
    "walrus of a name": ("import torch\nif (d := torch.device):\n  USE(d)", "torch.device"),
    "import_module": ("import importlib\nt = importlib.import_module('torch.nn')\nUSE(t.Linear)", "torch.nn.Linear"),
    "__import__": ("t = __import__('torch')\nUSE(t.device)", "torch.device"),
    "in a function": ("import torch\ndef f():\n  USE(torch.device)", "torch.device"),
    "in a method": ("import torch\nclass A:\n  def f(self):\n    USE(torch.device)", "torch.device"),
    "in a lambda": ("import torch\nf = lambda: USE(torch.device)", "torch.device"),
    "in nested functions": ("def f():\n  import torch\n  def g():\n    USE(torch.device)", "torch.device"),
    "imported after the function": ("def f():\n  USE(torch.device)\nimport torch", "torch.device"),
    "function-local import": ("def f():\n  import torch\n  USE(torch.device)", "torch.device"),
    "in a comprehension": ("import torch\n[USE(torch.device) for i in x]", "torch.device"),
    "first iterable of a comprehension": ("import torch\n[0 for torch in USE(torch.device)]", "torch.device"),
    "the same twice": ("import torch\nimport torch\nUSE(torch.device)", "torch.device"),
    "both branches": ("if a:\n  import torch\nelse:\n  import torch\nUSE(torch.device)", "torch.device"),
    "try and except agree": (
        "try:\n  from torch.nn import Linear\nexcept ImportError:\n  from torch.nn.modules.linear import Linear\nUSE(Linear)",
        "torch.nn.Linear",
    ),
    "optional import": ("try:\n  import torch\nexcept ImportError:\n  torch = None\nUSE(torch.device)", "torch.device"),
    "optional, else": ("if ok:\n  import torch\nelse:\n  torch = None\nUSE(torch.device)", "torch.device"),
    "optional name called": (
        "try:\n  from torch import device\nexcept ImportError:\n  device = None\ndevice(USE(device.x))",
        "torch.device.x",
    ),
    "overwritten before": ("import fake as torch\nimport torch\nUSE(torch.device)", "torch.device"),
    "reassigned later": ("import torch\nUSE(torch.device)\ntorch = 3", "torch.device"),
    "local of another function": ("import torch\ndef g():\n  torch = 1\ndef f():\n  USE(torch.device)", "torch.device"),
    "parameter of another function": ("import torch\ndef g(torch): pass\nUSE(torch.device)", "torch.device"),
    "attribute of that name": ("import torch\nself.torch = 3\nUSE(torch.device)", "torch.device"),
    "class attribute is not seen in methods": (
        "import torch\nclass A:\n  torch = 3\n  def f(self):\n    USE(torch.device)",
        "torch.device",
    ),
    "class-level import": ("class A:\n  import torch\n  USE(torch.device)", "torch.device"),
    "class-level import of the same": ("import torch\nclass A:\n  torch = torch\n  USE(torch.device)", "torch.device"),
    "default argument": ("import torch\ndef f(torch=USE(torch.device)): pass", "torch.device"),
    "decorator": ("import torch\n@USE(torch.no_grad)\ndef torch(): pass", "torch.no_grad"),
    "base class": ("from torch import nn\nclass nn2(USE(nn.Module)): nn = 3", "torch.nn.Module"),
    "annotation of a parameter": ("import torch\ndef f(torch: USE(torch.Tensor)): pass", "torch.Tensor"),
    "global import in a function": ("def f():\n  global torch\n  import torch\ndef g():\n  USE(torch.device)", "torch.device"),
    "nonlocal": (
        "def f():\n  t = None\n  import torch as t\n  def g():\n    nonlocal t\n    USE(t.device)\n",
        "torch.device",
    ),
    "comprehension variable does not leak": ("import torch\n[torch for torch in x]\nUSE(torch.device)", "torch.device"),
    "canonical class": ("from torch.nn.modules.linear import Linear\nUSE(Linear)", "torch.nn.Linear"),
    "canonical optimizer": ("import torch.optim.adam as a\nUSE(a.Adam)", "torch.optim.Adam"),
    "builtin": ("USE(print)", "builtins.print"),
    "builtin shadowed above": ("from rich import print\nUSE(print)", "rich.print"),
    "builtin shadowed below": ("USE(print)\nfrom rich import print", "builtins.print"),
    "star import of torch.nn": ("from torch.nn import *\nUSE(Linear)", "torch.nn.Linear"),
    "star import of torch": ("from torch import *\nUSE(device)", "torch.device"),
    "star import beside an import": ("import torch\nfrom torch.nn.functional import *\nUSE(torch.device)", "torch.device"),
    "name above a known star import": ("import torch\nfrom torch.nn import *\nUSE(torch.device)", "torch.device"),
    "name below an unknown star import": ("from unknown import *\nimport torch\nUSE(torch.device)", "torch.device"),
    "module above an unknown star import": ("import torch\nfrom unknown import *\nUSE(torch.device)", "torch.device"),
    "only an unknown star import": ("from unknown import *\nUSE(Linear)", "unknown.Linear"),
    "a star import of a framework": ("from keras.layers import *\nUSE(Dense)", "keras.layers.Dense"),
    "builtin under a star import": ("from torch.nn import *\nUSE(print)", "builtins.print"),
    "builtin shadowed by a star import": ("from torch import *\nUSE(sum)", "torch.sum"),
    "monkey-patched elsewhere": ("import torch\ntorch.foo = 3\nUSE(torch.device)", "torch.device"),
    "with an import": ("from contextlib import suppress\nwith suppress(ImportError):\n  import torch\nUSE(torch.device)", "torch.device"),
    "identifiers are normalised": ("import ｔorch\nUSE(torch.device)", "torch.device"),
    "while loop": ("import torch\nwhile True:\n  USE(torch.device)", "torch.device"),
    "async function": ("import torch\nasync def f():\n  USE(torch.device)", "torch.device"),
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), RESOLVES.values(), ids=RESOLVES.keys())
def test_resolves(text: str, expected: str) -> None:
    assert resolved(text) == [expected]


MAY_BE_ELSE = {
    "never bound": "USE(torch.device)",
    "parameter": "import torch\ndef f(torch):\n  USE(torch.device)",
    "keyword-only parameter": "import torch\ndef f(*, torch=None):\n  USE(torch.device)",
    "star parameter": "import torch\ndef f(*torch):\n  USE(torch.device)",
    "lambda parameter": "import torch\nf = lambda torch: USE(torch.device)",
    "parameter of the outer function": "import torch\ndef f(torch):\n  def g():\n    USE(torch.device)",
    "local of the same function": "import torch\ndef f():\n  USE(torch.device)\n  torch = 1",
    "reassigned": "import torch\ntorch = fake()\nUSE(torch.device)",
    "reassigned to None": "import torch\ntorch = None\nUSE(torch.device)",
    "reassigned in a branch": "import torch\nif x:\n  torch = fake\nUSE(torch.device)",
    "reassigned later, used in a function": "import torch\ndef f():\n  USE(torch.device)\ntorch = fake",
    "reassigned later in the loop": "import torch\nfor i in x:\n  USE(torch.device)\n  torch = fake",
    "reassigned through global": "import torch\ndef f():\n  global torch\n  torch = fake\nUSE(torch.device)",
    "reassigned through nonlocal": "def f():\n  import torch\n  def g():\n    nonlocal torch\n    torch = 1\n  USE(torch.device)",
    "loop target": "import torch\nfor torch in x: pass\nUSE(torch.device)",
    "loop target inside": "import torch\nfor torch in x:\n  USE(torch.device)",
    "with target": "import torch\nwith x as torch:\n  USE(torch.device)",
    "with target unpacked": "import torch\nwith x as (a, torch):\n  USE(torch.device)",
    "except target": "import torch\ntry: pass\nexcept E as torch:\n  USE(torch.device)",
    "match capture": "import torch\nmatch x:\n  case [torch]:\n    USE(torch.device)",
    "match star": "import torch\nmatch x:\n  case [*torch]:\n    USE(torch.device)",
    "match rest": "import torch\nmatch x:\n  case {**torch}:\n    USE(torch.device)",
    "match as": "import torch\nmatch x:\n  case [1] as torch:\n    USE(torch.device)",
    "augmented assignment": "import torch\ntorch += 1\nUSE(torch.device)",
    "walrus": "import torch\n(torch := fake())\nUSE(torch.device)",
    "walrus in a comprehension": "import torch\n[(torch := i) for i in x]\nUSE(torch.device)",
    "comprehension target": "import torch\n[USE(torch.device) for torch in x]",
    "second generator": "import torch\n[0 for torch in x for i in USE(torch.device)]",
    "deleted": "import torch\ndel torch\nUSE(torch.device)",
    "starred target": "import torch\na, *torch = x\nUSE(torch.device)",
    "unpacked from a call": "import torch\na, torch = f()\nUSE(torch.device)",
    "function of that name": "import torch\ndef torch(): pass\nUSE(torch.device)",
    "class of that name": "import torch\nclass torch: pass\nUSE(torch.device)",
    "other module of that name": "import fake as torch\nif x:\n  import torch\nUSE(torch.device)",
    "branches differ": "if x:\n  import torch\nelse:\n  import fake as torch\nUSE(torch.device)",
    "fallback differs": "try:\n  import torch\nexcept ImportError:\n  import fake as torch\nUSE(torch.device)",
    "fallback class": "try:\n  from torch import device\nexcept ImportError:\n  class device: pass\nUSE(device)",
    "optional name, not called": "try:\n  from torch import device\nexcept ImportError:\n  device = None\nUSE(device)",
    "class attribute": "import torch\nclass A:\n  torch = 3\n  USE(torch.device)",
    "class attribute, maybe": "import torch\nclass A:\n  if x:\n    torch = 3\n  USE(torch.device)",
    "attribute of self": "import torch\nclass A:\n  def f(self):\n    USE(self.torch.device)",
    "result of a call": "import torch\nUSE(torch.get().device)",
    "item": "import torch\nUSE(torch['x'].device)",
    "unknown star import below": "from torch import device\nfrom unknown import *\nUSE(device)",
    "two unknown star imports": "from unknown import *\nfrom more import *\nUSE(Linear)",
    "a known and an unknown star import": "from torch.nn import *\nfrom unknown import *\nUSE(Linear)",
    "builtin under an unknown star import": "from unknown import *\nUSE(print)",
    "two stars with one name": "from torch.nn import *\nfrom torch.nn.parallel import *\nfrom torch import *\nUSE(Xyz)",
    "monkey-patched": "import torch\ntorch.device = fake\nUSE(torch.device)",
    "monkey-patched by setattr": "import torch\nsetattr(torch, 'device', fake)\nUSE(torch.device)",
    "monkey-patched by a loop": "import torch\nfor torch.device in x: pass\nUSE(torch.device)",
    "overwritten through each other": "import torch\ntorch.a.b = 1\ntorch.b.a = 2\ntorch.a = torch.b = 3\nUSE(torch.a.b)",
    "used before it is imported": "USE(torch.device)\nimport torch",
    "monkey-patched on the way": "import torch\ntorch.cuda = fake\nUSE(torch.cuda.device)",
    "monkey-patched through an alias": "import torch, torch as t\nt.device = fake\nUSE(torch.device)",
    "alias of a reassigned name": "import torch\nL = torch.nn.Linear\nL = other(L)\nUSE(L)",
    "alias changes in the loop": "from torch import nn\nL = nn.Linear\nfor i in x:\n  USE(L)\n  L = nn.Conv2d",
    "circular aliases": "a = b\nb = a\nUSE(a.x)",
    "circular aliases in a loop": "while x:\n  a = b\n  b = a\n  USE(a.x)",
    "name bound by global only": "def f():\n  global torch\n  torch = 1\nUSE(torch.device)",
    "relative import without a module": "from . import torch\nUSE(torch.device)",
    "annotation only in a function": "import torch\ndef f():\n  torch: int\n  USE(torch.device)",
    "builtin maybe shadowed": "if x:\n  from rich import print\nUSE(print)",
    "store": "import torch\nUSE((torch := 1))",
}  # fmt: skip


@pytest.mark.parametrize("text", MAY_BE_ELSE.values(), ids=MAY_BE_ELSE.keys())
def test_never_on_spelling(text: str) -> None:
    assert resolved(text) == [None]


def test_each_use_sees_its_own_binding() -> None:
    text = "from torch import nn\nL = nn.Linear\nUSE(L)\nL = nn.Conv2d\nUSE(L)\nL = make()\nUSE(L)"
    assert resolved(text) == ["torch.nn.Linear", "torch.nn.Conv2d", None]


def test_relative_imports_start_at_the_module() -> None:
    text = "from . import a\nfrom .b import c\nfrom ..d import e\nUSE(a.x)\nUSE(c)\nUSE(e)"
    assert resolved(text, module="p.q.m") == ["p.q.a.x", "p.q.b.c", "p.d.e"]
    assert resolved(text, module="p.q", is_package=True) == ["p.q.a.x", "p.q.b.c", "p.d.e"]
    assert resolved(text, module="m") == [None, None, None]


def test_own_definitions_have_the_modules_name() -> None:
    assert resolved("class Net: pass\nUSE(Net)", module="train") == ["train.Net"]
    assert resolved("class Net: pass\nUSE(Net)") == [None]


def test_own_modules_are_followed() -> None:
    blocks = Names(
        ast.parse("import torch\nfrom torch import nn\nLin = nn.Linear\n_x = 1\ndef helper(): pass"), "blocks"
    )
    text = "from blocks import *\nimport blocks\nUSE(Lin)\nUSE(nn.ReLU)\nUSE(torch.device)\nUSE(blocks.Lin)\nUSE(helper)\nUSE(_x)"
    assert resolved(text, modules={"blocks": blocks}) == [
        "torch.nn.Linear",
        "torch.nn.ReLU",
        "torch.device",
        "torch.nn.Linear",
        "blocks.helper",
        None,
    ]


def test_a_star_import_of_ones_own_module_may_rebind_the_same() -> None:
    blocks = Names(ast.parse("import torch"), "blocks")
    fakes = Names(ast.parse("torch = object()"), "fakes")
    modules = {"blocks": blocks, "fakes": fakes}
    assert resolved("import torch\nfrom blocks import *\nUSE(torch.device)", modules=modules) == ["torch.device"]
    assert resolved("import torch\nfrom fakes import *\nUSE(torch.device)", modules=modules) == [None]


def test_all_limits_a_star_import() -> None:
    names = Names(ast.parse("from torch import nn\n__all__ = ['nn', 'made']\nhidden = 1"), "m")
    assert names.star() == {"nn", "made"}
    assert Names(ast.parse("__all__ = ['a'] + other"), "m").star() is None
    assert Names(ast.parse("__all__ = ['a']\n__all__ += ['b']"), "m").star() is None
    assert Names(ast.parse("__all__ = ['a']\n__all__.append('b')"), "m").star() is None


@pytest.mark.slow
def test_the_table_of_star_imports_is_torchs_own() -> None:
    import importlib

    from gemini.instrument.names.framework_names import torch_star_imports

    for module, names in torch_star_imports().items():
        loaded = importlib.import_module(module)
        public = getattr(loaded, "__all__", None) or [name for name in vars(loaded) if not name.startswith("_")]
        assert set(public) - names <= set(dir(loaded)), module
        missing = set(public) - names
        assert len(missing) <= 0.1 * len(public), (module, missing)
