"""User modules are parsed, never imported; installed ones only contribute the names of their star imports."""

import sys
from pathlib import Path

from gemini.instrument.names.module_exports import ModuleExports
from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.pattern import Rewrite
from gemini.instrument.text.source_file import SourceFile

LINEAR = Rewrite("torch.nn.Linear($args)", "mylib.Linear($args)")
DEVICE = Rewrite("torch.device($args)", "mylib.device($args)", name="device")


def run(folder: Path, name: str, text: str, module: str = "__main__") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return PassManager([LINEAR, DEVICE]).run(SourceFile.read(path, module)).text


def test_star_imports_of_the_scripts_neighbours(tmp_path: Path) -> None:
    (tmp_path / "blocks.py").write_text("import torch\nfrom torch.nn import *\nraise RuntimeError('never imported')\n")
    text = "import torch\nfrom blocks import *\nx = Linear(1)\ny = torch.device('cpu')\n"
    made = run(tmp_path, "train.py", text)
    assert made.count("__import__") == 2
    assert "blocks" not in sys.modules


def test_a_neighbour_that_rebinds_a_name_is_seen(tmp_path: Path) -> None:
    (tmp_path / "fakes.py").write_text("torch = object()\n")
    text = "import torch\nfrom fakes import *\ny = torch.device('cpu')\n"
    assert run(tmp_path, "train.py", text) == text


def test_packages_and_relative_imports(tmp_path: Path) -> None:
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg" / "__init__.py").write_text("from .layers import Lin\n")
    (tmp_path / "pkg" / "layers.py").write_text("from torch.nn import Linear as Lin\n")
    made = run(
        tmp_path,
        "pkg/sub/train.py",
        "from ..layers import Lin\nfrom .. import Lin as M\nLin(1), M(2) # Linear\n",
        "pkg.sub.train",
    )
    assert made.count("__import__") == 2
    made = run(tmp_path, "main.py", "import pkg\npkg.Lin(1), pkg.layers.Lin(2) # Linear\n")
    assert made.count("__import__") == 2


def test_modules_that_import_each_other(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text("from two import *\nfrom torch import nn\n")
    (tmp_path / "two.py").write_text("from one import *\n")
    text = "from one import *\nnn.Linear(1) # torch\n"
    assert run(tmp_path, "train.py", text) == text  # the circle ends, and in doubt nothing matches


def test_unreadable_neighbours_are_unknown(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("x = (\n")
    text = "from torch import device\nfrom bad import *\nfrom worse import *\ndevice(1)\n"
    assert run(tmp_path, "train.py", text) == text


def test_installed_modules_tell_their_star_names() -> None:
    loaded = set(sys.modules)
    lookup = ModuleExports().beside(SourceFile("/nowhere/a.py", b"", "a"))
    for module, name in [("math", "sqrt"), ("os.path", "join"), ("networkx.utils", "pairwise")]:
        known = lookup(module)
        assert known is not None
        star = known.star()
        assert star is None or name in star, module
    assert "networkx.utils" not in set(sys.modules) - loaded, "read, not imported"
