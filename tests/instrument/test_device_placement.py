"""Device placement: what it rewrites, and that a script with hard-coded devices equals one with "cpu" written in."""

from __future__ import annotations

import contextlib
import io
import textwrap
import zipfile
from pathlib import Path

import pytest
import torch

from gemini.instrument.pass_manager.manager import PassManager
from gemini.instrument.passes.device_placement import DevicePlacement
from gemini.instrument.text.source_file import SourceFile

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="these devices are absent only without CUDA")


def instrumented(text: str, path: str | Path = "script.py") -> str:
    done = PassManager([DevicePlacement()]).run(SourceFile.from_text(textwrap.dedent(text), str(path), "__main__"))
    assert not done.failures, done.failures
    return done.text.replace("import gemini.managed as __gemini__; ", "")


def output_of(text: str) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(text, "script.py", "exec"), {"__name__": "__main__"})
    return said.getvalue()


REWRITES = [
    ("x = model.cuda()", "x = __gemini__.on(model).cuda()"),
    ("x.cuda(0, non_blocking=True)", "__gemini__.on(x).cuda(0, non_blocking=True)"),
    ("x.to('cuda:0')", "__gemini__.on(x).to('cuda:0')"),
    ("x.to(device, torch.float16)", "__gemini__.on(x).to(device, torch.float16)"),
    ("x.to(device=d)", "__gemini__.on(x).to(device=d)"),
    ("x.pin_memory()", "__gemini__.on(x).pin_memory()"),
    ("x.new_zeros(3, device=d)", "x.new_zeros(3, device=__gemini__.device(d))"),
    ("torch.zeros(3, device='cuda')", "torch.zeros(3, device=__gemini__.device('cuda'))"),
    ("torch.zeros(3, pin_memory=True)", "torch.zeros(3, pin_memory=__gemini__.pin_memory(True))"),
    ("nn.Linear(2, 2, device=args.device)", "nn.Linear(2, 2, device=__gemini__.device(args.device))"),
    ("torch.device('cuda:1')", "torch.device(__gemini__.device('cuda:1'))"),
    ("torch.device('cuda', 1)", "__gemini__.device(torch.device('cuda', 1))"),
    ("torch.device(type='cuda')", "__gemini__.device(torch.device(type='cuda'))"),
    ("torch.set_default_device('cuda')", "torch.set_default_device(__gemini__.device('cuda'))"),
    ("torch.Generator('cuda')", "torch.Generator(__gemini__.device('cuda'))"),
    ("torch.load(f)", "torch.load(f, map_location=__gemini__.map_location())"),
    ("torch.load(f, **options)", "torch.load(f, **__gemini__.keywords(options))"),
    ("torch.zeros(3, **options)", "torch.zeros(3, **__gemini__.keywords(options))"),
    ("partial(torch.zeros, device=d)", "partial(torch.zeros, device=__gemini__.device(d))"),
    (
        "nn.parallel.DistributedDataParallel(m, [r])",
        "nn.parallel.DistributedDataParallel(m, __gemini__.device_ids([r]))",
    ),
    (
        "nn.parallel.DistributedDataParallel(m, device_ids=[r])",
        "nn.parallel.DistributedDataParallel(m, device_ids=__gemini__.device_ids([r]))",
    ),
    ("dist.init_process_group('nccl')", "dist.init_process_group(__gemini__.backend('nccl'))"),
    ("dist.init_process_group(backend=b)", "dist.init_process_group(backend=__gemini__.backend(b))"),
    ("torch.load((f),)", "torch.load((f), map_location=__gemini__.map_location(),)"),
    (
        "torch.load(f, weights_only=(True))",
        "torch.load(f, weights_only=(True), map_location=__gemini__.map_location())",
    ),
    ("torch.load(f, map_location='cuda')", "torch.load(f, map_location=__gemini__.map_location('cuda'))"),
    ("torch.load(f, 'cuda')", "torch.load(f, __gemini__.map_location('cuda'))"),
    ("torch.jit.load(f)", "torch.jit.load(f)"),
    ("torch.jit.load(f, map_location=d)", "torch.jit.load(f, map_location=__gemini__.device(d))"),
    ("torch.cuda.synchronize()", "__gemini__.stand_in(torch.cuda.synchronize)()"),
    ("sync()", "__gemini__.stand_in(sync)()"),
    ("torch.autocast('cuda')", "torch.autocast(__gemini__.device_type('cuda'))"),
    ("torch.autocast(device_type='cuda')", "torch.autocast(device_type=__gemini__.device_type('cuda'))"),
    ("torch.cuda.amp.GradScaler()", "__gemini__.stand_in(torch.cuda.amp.GradScaler)()"),
    ("torch.amp.GradScaler('cuda')", "torch.amp.GradScaler(__gemini__.device_type('cuda'))"),
    ("torch.amp.GradScaler(device='cuda')", "torch.amp.GradScaler(device=__gemini__.device_type('cuda'))"),
    (
        "torch.set_default_tensor_type('torch.cuda.FloatTensor')",
        "torch.set_default_tensor_type(__gemini__.tensor_type('torch.cuda.FloatTensor'))",
    ),
    ("x.type('torch.cuda.FloatTensor')", "x.type(__gemini__.tensor_type('torch.cuda.FloatTensor'))"),
    ("x.type(torch.cuda.FloatTensor)", "x.type(__gemini__.stand_in(torch.cuda.FloatTensor))"),
]
UNTOUCHED = [
    "x.to('cpu')",
    "x.to(torch.float32)",
    "x.to(dtype=torch.float32)",
    "x.to()",
    "torch.zeros(3, device=None)",
    "torch.zeros(3, device='cpu')",
    "torch.device('cpu')",
    "torch.load(*args)",
    "x.to('local')",
    "DataLoader(data, **options)",
    "dist.init_process_group('gloo')",
    "partial(build, device='cuda'), partial(DataLoader, **options)",
    "DataLoader(data, pin_memory=True)",
    "torch.cuda.is_available()",
    "build(device='cuda')",
    "def f(event: torch.cuda.Event) -> torch.cuda.Stream: ...",
    "device = 'cuda'",
    "isinstance(x, (torch.cuda.FloatTensor, torch.cuda.Event))",
    "type(x) is torch.cuda.FloatTensor",
]
IMPORTS = """\
import torch, torch.nn as nn
from torch.cuda import synchronize as sync
from torch.utils.data import DataLoader
from functools import partial
import torch.distributed as dist
"""


@pytest.mark.parametrize(("before", "after"), REWRITES)
def test_rewrites(before: str, after: str) -> None:
    assert instrumented(IMPORTS + before + "\n") == IMPORTS + after + "\n"


@pytest.mark.parametrize("line", UNTOUCHED)
def test_leaves_alone(line: str) -> None:
    assert instrumented(IMPORTS + line + "\n") == IMPORTS + line + "\n"


def test_names_are_resolved_not_spelled() -> None:
    text = "def f(torch):\n    return torch.device('cuda'), torch.zeros(3, device='cuda')\n"
    assert instrumented(text) == text


def test_a_file_that_only_moves_what_it_is_given() -> None:
    text = "import os\ndef move(batch, device):\n    return [x.to(device) for x in batch], zone.to('local')\n"
    assert instrumented(text) == text.replace("x.to(device)", "__gemini__.on(x).to(device)")


def test_files_that_have_torch_from_a_module_of_the_program(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from torch import nn, zeros, device as Place\nfrom torch.cuda import synchronize\n"
    )
    text = """\
    from own import *
    net = nn.Linear(2, 2, device=where)
    Place("cuda", 0), zeros(1, device=where), synchronize()
    """
    wanted = """\
    from own import *
    net = nn.Linear(2, 2, device=__gemini__.device(where))
    __gemini__.device(Place("cuda", 0)), zeros(1, device=__gemini__.device(where)), __gemini__.stand_in(synchronize)()
    """
    renamed = ("from own import *", "from own import nn, Place as P, zeros, synchronize"), ('Place("', 'P("')
    through = (
        ("from own import *", "import own"), (" nn.", " own.nn."), ("Place(", "own.Place("), (" zeros(", " own.zeros("),
        (" synchronize(", " own.synchronize("), ("(synchronize)", "(own.synchronize)"),
    )  # fmt: skip
    for changes in ((), renamed, through):
        before, after = text, wanted
        for old, new in changes:
            before, after = before.replace(old, new), after.replace(old, new)
        assert instrumented(before, tmp_path / "script.py") == textwrap.dedent(after)


def test_functions_that_torch_reads_as_text_stay_as_they_are() -> None:
    text = "import torch\n@torch.jit.script\ndef f(x: torch.Tensor):\n    return x.to('cuda')\n"
    assert instrumented(text) == text


SCRIPTS = {
    "tensors": """
        import torch
        x = torch.arange(4.0).cuda()
        y = torch.ones(4, device="cuda:0").to("cuda", torch.float64)
        z = torch.zeros(2, pin_memory=False).pin_memory().to(torch.device("cuda"), non_blocking=True)
        print(x, y, z, x.device, (x + y).sum().item(), x.new_zeros(2, device="cuda:0").device)
    """,
    "names": """
        import torch
        device = torch.device("cuda:0")
        for name in ("cuda", "cuda:0", device):
            print(torch.empty(0, device=name).device, torch.empty(0).to(name).device)
        with torch.device("cuda"):
            print(torch.zeros(1).device)
        print(torch.empty(1, device=torch.device("cuda", 0)).device.type)
    """,
    "training": """
        import torch
        from torch import nn
        torch.manual_seed(0)
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 1)
            def forward(self, x):
                return self.b(torch.relu(self.a(x)))
        net = nn.DataParallel(Net().cuda(), device_ids=[0])
        opt = torch.optim.Adam(net.parameters(), lr=0.1)
        for _ in range(3):
            x = torch.randn(5, 4).cuda(non_blocking=True)
            loss = net(x).pow(2).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            torch.cuda.synchronize()
            print(loss.item())
    """,
    "mixed precision": """
        import torch
        torch.manual_seed(0)
        net = torch.nn.Linear(4, 1).to("cuda")
        scaler = torch.amp.GradScaler("cuda")
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            out = net(torch.ones(2, 4, device="cuda"))
        scaler.scale(out.float().sum()).backward()
        scaler.step(opt)
        scaler.update()
        print(out.dtype, out, net.weight)
    """,
    "generators": """
        import torch
        g = torch.Generator(device="cuda").manual_seed(3)
        print(torch.rand(3, generator=g, device="cuda"))
        torch.set_default_device("cuda")
        print(torch.zeros(2).device)
        torch.set_default_device(None)
    """,
    "legacy types": """
        import torch
        print(torch.ones(2).type("torch.cuda.DoubleTensor"), torch.ones(2).type(torch.cuda.IntTensor))
        torch.set_default_tensor_type("torch.cuda.FloatTensor")
        print(torch.zeros(1).dtype, torch.cuda.FloatTensor([1, 2]))
    """,
    "checkpoint": """
        import io, torch
        file = io.BytesIO()
        torch.save({"w": torch.arange(3)}, file)
        for where in ("cuda", torch.device("cuda:0"), {"cuda:1": "cuda:0"}, lambda s, l: s, lambda s, l: s.cuda(0)):
            file.seek(0)
            print(torch.load(file, map_location=where))
    """,
    "distributed": """
        import tempfile, torch
        import torch.distributed as dist
        from torch.nn.parallel import DistributedDataParallel as DDP
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=0, world_size=1)
            net = DDP(torch.nn.Linear(2, 1).cuda(), device_ids=[0], output_device=0)
            print(dist.get_backend(), net(torch.ones(1, 2).cuda()))
            dist.destroy_process_group()
    """,
    "options": """
        import torch
        options = {"device": "cuda", "dtype": torch.float64}
        print(torch.zeros(2, **options), torch.nn.Linear(2, 1, **options).weight.device, options["dtype"])
        print(torch.ones(1).new_zeros(2, **options).to(**options))
    """,
}


@without_cuda
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SCRIPTS)
def test_results_equal_the_script_with_cpu_written_in(name: str) -> None:
    script = textwrap.dedent(SCRIPTS[name])
    plain = script.replace("cuda:0", "cpu").replace('"cuda', '"cpu').replace("torch.cuda.synchronize()", "pass")
    plain = (
        plain.replace(".cuda(", ".to('cpu', ").replace(".pin_memory()", "").replace('torch.device("cpu", 0)', "'cpu'")
    )
    plain = plain.replace("nccl", "gloo").replace(", device_ids=[0], output_device=0", "")
    plain = plain.replace("to('cpu', )", "to('cpu')").replace("s.to('cpu', 0)", "s").replace("torch.cuda.", "torch.")
    done = PassManager([DevicePlacement()]).run(SourceFile.from_text(script, "script.py", "__main__"))
    assert done.changed
    assert output_of(done.text) == output_of(plain)


@without_cuda
def test_a_checkpoint_of_another_machine_loads(tmp_path: Path) -> None:
    path = tmp_path / "gpu.pt"
    tensor = torch.arange(4.0)
    torch.save({"w": tensor}, path)
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    pickled = next(name for name in entries if name.endswith("data.pkl"))
    entries[pickled] = entries[pickled].replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:0")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    with pytest.raises(RuntimeError, match="CUDA"):
        torch.load(path)
    script = f"import torch\nprint(torch.load({str(path)!r})['w'])\n"
    done = PassManager([DevicePlacement()]).run(SourceFile.from_text(script, "script.py", "__main__"))
    assert output_of(done.text) == f"{tensor}\n"
