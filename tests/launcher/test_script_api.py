"""Device placement at run time: which device requests are redirected, which pass through, and what is logged."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

from gemini.instrument.names.device_names import CUDA_STUBS, DEVICE_KEYWORDS
from gemini.launcher import script_api as managed
from gemini.launcher.script_api.cuda_stubs import REPLACEMENTS, SCALERS
from gemini.launcher.script_api.script_devices import KEYWORDS

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="these devices are absent only without CUDA")


@pytest.mark.parametrize("value", [None, "cpu", "meta", torch.device("cpu"), 3.5, torch.float16, "cudda", "", b"cuda"])
def test_what_names_no_absent_device_passes_through(value: object) -> None:
    assert managed.device(value) is value


@without_cuda
@pytest.mark.parametrize("value", ["cuda", "cuda:0", "cuda:7", 0, "mps", "xpu:1"])
def test_absent_devices_become_the_managed_one(value: object) -> None:
    assert managed.device(value) == "cpu"


@without_cuda
def test_the_type_of_a_device_is_kept() -> None:
    assert managed.device(torch.device("cuda", 1)) == torch.device("cpu")


@without_cuda
def test_a_run_time_may_choose_another() -> None:
    before = managed.set_managed_device("meta")
    try:
        assert managed.on(torch.ones(2)).cuda().device.type == "meta"
    finally:
        managed.set_managed_device(before)


class Own:
    """A user's class with methods of the same names."""

    def cuda(self, *args: object) -> tuple[object, ...]:
        return ("mine", *args)

    to = pin_memory = cuda


def test_objects_that_are_not_torchs_keep_their_methods() -> None:
    own = Own()
    assert managed.on(own) is own
    assert managed.on(own).cuda(0) == ("mine", 0)
    with pytest.raises(AttributeError, match="'list' object has no attribute 'cuda'"):
        managed.on([]).cuda()


class Overriding(nn.Linear):
    """A module whose author wrote its own `cuda` and calls the base's."""

    def cuda(self, device: object = None) -> Overriding:
        self.moved = device
        return managed.on(super()).cuda(device)  # type: ignore[no-any-return]


@without_cuda
def test_a_modules_own_method_is_called() -> None:
    module = Overriding(1, 1)
    assert managed.on(module).cuda("cuda:0") is module
    assert module.moved == "cuda:0"
    assert managed.on(module).to("cuda:0", torch.float64).weight.dtype == torch.float64


@without_cuda
def test_tensors_and_modules_move() -> None:
    x = torch.ones(2)
    assert managed.on(x).cuda() is x
    assert managed.on(x).cuda(0, True) is x
    assert managed.on(x).to(0) is x
    assert managed.on(x).to(device="cuda", dtype=torch.int32).dtype == torch.int32
    assert managed.on(x).to(x.double()).dtype == torch.float64
    assert managed.on(x).pin_memory() is x
    assert managed.on(nn.Linear(1, 1)).to_empty(device="cuda").weight.device.type == "cpu"
    packed = nn.utils.rnn.pack_sequence([torch.ones(2)])
    assert managed.on(packed).to("cuda").data.device.type == "cpu"


@without_cuda
@pytest.mark.filterwarnings("ignore")
def test_every_stand_in_exists_and_answers() -> None:
    start, end = (managed.stand_in(torch.cuda.Event)(enable_timing=True) for _ in range(2))
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0
    with managed.stand_in(torch.cuda.device)(0), torch.cuda.stream(managed.stand_in(torch.cuda.Stream)()):
        pass
    assert managed.stand_in(torch.cuda.current_device)() == 0
    assert managed.stand_in(torch.cuda.get_device_properties)(0).total_memory > 0
    assert managed.stand_in(torch.cuda.FloatTensor)([1.0, 2.0]).tolist() == [1.0, 2.0]
    state = managed.stand_in(torch.cuda.get_rng_state)()
    drawn = torch.rand(3)
    managed.stand_in(torch.cuda.set_rng_state)(state)
    assert torch.equal(torch.rand(3), drawn)
    assert managed.stand_in(torch.cuda.is_available) is torch.cuda.is_available
    assert "torch.cuda.is_available" not in CUDA_STUBS


@without_cuda
def test_torch_compile_traces_through() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return managed.on(x).to("cuda") + torch.ones(2, device=managed.device("cuda"))  # type: ignore[no-any-return]

    f(torch.ones(2))  # the notice is printed here, outside of the traced function
    assert torch.compile(f, backend="eager", fullgraph=True)(torch.ones(2)).tolist() == [2.0, 2.0]


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)


@without_cuda
def test_one_line_a_device_is_said_once() -> None:
    done = python("""
        import torch, gemini.managed as g
        for _ in range(3):
            g.device("cuda"); g.device(torch.device("cuda:0")); g.on(torch.ones(1)).cuda(1)
    """)
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "gemini: cuda:0 is not on this machine: using cpu",
        "gemini: cuda:1 is not on this machine: using cpu",
    ]


def test_no_framework_is_imported() -> None:
    done = python("""
        import sys, gemini.managed as g
        assert g.device("cuda") == "cuda" and g.on("x") == "x" and g.model(3) == 3
        assert "torch" not in sys.modules and "numpy" not in sys.modules
    """)
    assert done.stderr == ""


@without_cuda
def test_mixed_precision_is_torchs_own_affair_until_a_device_was_replaced() -> None:
    done = python("""
        import torch, warnings, gemini.managed as g
        warnings.simplefilter("ignore")
        print(g.device_type("cuda"), g.stand_in(torch.cuda.amp.GradScaler)().is_enabled())
        g.device("cuda")
        print(g.device_type("cuda"), g.stand_in(torch.cuda.amp.GradScaler)().is_enabled())
    """)
    assert done.stdout.split() == ["cuda", "False", "cpu", "True"]


@without_cuda
def test_what_a_program_puts_in_torchs_place_is_its_own() -> None:
    done = python("""
        import torch, gemini.managed as g
        torch.cuda.synchronize = mine = lambda: "mine"
        print(g.stand_in(torch.cuda.synchronize) is mine, g.device_type("cuda"))
        print(g.stand_in(torch.cuda.current_device)())
    """)
    assert done.stdout.split() == ["True", "cuda", "0"]


def test_the_script_api_has_a_function_for_every_name_that_the_pass_inserts() -> None:
    assert tuple(KEYWORDS) == DEVICE_KEYWORDS
    replaced = {f"torch.{name}" for name in (*REPLACEMENTS, *SCALERS)}
    assert replaced == {name for name in CUDA_STUBS if not name.endswith("Tensor")}
