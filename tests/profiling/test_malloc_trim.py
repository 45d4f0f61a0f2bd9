"""Profiling retains freed memory from the first node on and returns it at the end."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys

import pytest

from gemini.malloc import retain_freed_memory

PROGRAM = """
import json, resource, torch
from gemini.malloc import retain_freed_memory

def faults(call):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

sizes = [4 << 20] * 40
take = lambda: [torch.zeros(size, dtype=torch.uint8) for size in sizes]
before = resident()
with retain_freed_memory(sizes):
    first = faults(take)
    second = faults(take)
print(json.dumps({"first": first, "second": second, "pages": sum(sizes) // resource.getpagesize(),
                  "left": resident() - before, "taken": sum(sizes)}))
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library cannot be told to keep memory")
def test_memory_is_there_at_once_and_returned_at_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    found = json.loads(done.stdout)
    assert found["first"] < found["pages"] / 3
    assert found["second"] < found["pages"] / 3
    assert found["left"] < found["taken"] / 4


def test_an_error_inside_passes_through() -> None:
    with pytest.raises(ZeroDivisionError), retain_freed_memory([1 << 20]):
        _ = 1 / 0
