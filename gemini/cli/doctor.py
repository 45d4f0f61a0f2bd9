"""Show what this installation can do: versions, devices, links, limits, optional parts and what is missing.

gemini doctor
gemini doctor --json

Exit code 1 where something prevents workers: it is marked, with the remedy.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

SUMMARY = "show versions, devices, links, limits and optional parts of this installation"
FAULTY = 1
_DISTRIBUTION = "gemini-instrumenter"
_LEAST_FILES = 256  # descriptors: each worker takes a few, and so does each parameter folder
_LEAST_SHARED_MB = 64
_COPIED = 1 << 26  # bytes


@dataclass(frozen=True)
class Fact:
    """One line: its group, a name, what was found, and what to do where that is a fault or a limitation."""

    group: str
    name: str
    found: str
    remedy: str = ""
    is_fault: bool = False

    def __str__(self) -> str:
        mark = "!!" if self.is_fault else "– " if self.remedy else "  "
        return f" {mark} {self.name:<22} {self.found}" + (f"\n      → {self.remedy}" if self.remedy else "")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini doctor`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Print all facts; exit code 1 if one is a fault."""
    facts = [*_versions(), *_devices(), *_links(), *_limits(), *_parts()]
    if args.json:
        print(json.dumps([asdict(fact) for fact in facts], indent=1))
    else:
        group = ""
        for fact in facts:
            if fact.group != group:
                group = fact.group
                print(group)
            print(fact)
    return FAULTY if any(fact.is_fault for fact in facts) else 0


def _versions() -> Iterator[Fact]:
    from gemini import __version__
    from gemini.errors import GeminiError
    from gemini.torch_range import check_torch

    yield Fact("versions", "gemini", f"{__version__} ({os.path.dirname(os.path.dirname(os.path.abspath(__file__)))})")
    yield Fact("versions", "python", f"{platform.python_version()} ({sys.executable})")
    system = f"{platform.system()} {platform.release()}, {platform.machine()}"
    is_linux = sys.platform == "linux"
    yield Fact("versions", "system", system, "" if is_linux else "workers need Linux", is_fault=not is_linux)
    try:
        import torch

        check_torch()
        yield Fact("versions", "torch", torch.__version__)
    except ImportError as error:
        yield Fact("versions", "torch", str(error), "pip install torch", is_fault=True)
    except GeminiError as error:
        yield Fact("versions", "torch", str(error).partition("\n")[0], "install a supported version", is_fault=True)


def _devices() -> Iterator[Fact]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    few = "" if cores > 1 else "one core: CPU workers take turns, so they cannot make a step faster"
    yield Fact("devices", "processor cores", f"{cores} of {os.cpu_count()}", few)
    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        yield Fact("devices", "OMP_NUM_THREADS", threads)
    try:
        import torch
    except ImportError:
        return
    if not torch.cuda.is_available():
        yield Fact("devices", "GPUs", "none: workers run on the CPU")
        return
    for at in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(at)
        peers = [
            to for to in range(torch.cuda.device_count()) if to != at and torch.cuda.can_device_access_peer(at, to)
        ]
        linked = f", direct access to {', '.join(map(str, peers))}" if peers else ""
        yield Fact("devices", f"cuda:{at}", f"{facts.name}, {facts.total_memory / 2**30:.1f} GiB{linked}")


def _links() -> Iterator[Fact]:
    """Yield how workers exchange values."""
    try:
        import torch
        from torch import distributed
    except ImportError:
        return
    block = torch.empty(_COPIED, dtype=torch.uint8)
    copy, times = torch.empty_like(block).copy_(block), []
    for _ in range(3):
        began = time.perf_counter()
        copy.copy_(block)
        times.append(time.perf_counter() - began)
    speed = _COPIED / min(times) / 1e9
    yield Fact("links", "workers on this host", f"shared memory; one thread copies {speed:.1f} GB/s")
    available = distributed.is_available()
    names = [name for name in ("gloo", "nccl") if available and getattr(distributed, f"is_{name}_available")()]
    missing = "" if names else "workers on other hosts need a torch with gloo"
    yield Fact("links", "between hosts", ", ".join(names) or "none", missing)
    interfaces = [name for _, name in socket.if_nameindex() if name != "lo"]
    yield Fact("links", "network interfaces", ", ".join(interfaces) or "none")


def _cgroup() -> Iterator[Fact]:
    """Yield the limits of the control group, as those of a container."""
    limits = []
    for name, unit in (("cpu.max", "cores"), ("memory.max", "GB"), ("pids.max", "processes")):
        try:
            words = Path("/sys/fs/cgroup", name).read_text(encoding="ascii").split()
        except OSError:
            continue
        if words and words[0] != "max":
            size = float(words[0]) / (float(words[1]) if unit == "cores" else 1e9 if unit == "GB" else 1)
            limits.append(f"{size:.3g} {unit}")
    yield Fact("limits", "control group", ", ".join(limits) or "no limit")


def _limits() -> Iterator[Fact]:
    from gemini.runtime.devices.host_memory import available_memory, format_bytes

    memory = available_memory()
    if memory is not None:
        yield Fact("limits", "memory", f"{format_bytes(memory[0])} {memory[1]}")
    try:
        space = shutil.disk_usage("/dev/shm")
    except OSError:
        yield Fact("limits", "shared memory", "no /dev/shm", "mount a tmpfs at /dev/shm", is_fault=True)
    else:
        small = space.free < _LEAST_SHARED_MB << 20
        remedy = "enlarge it (docker run --shm-size=1g)" if small else ""
        yield Fact("limits", "shared memory", f"{format_bytes(space.free)} free in /dev/shm", remedy, is_fault=small)
    yield from _cgroup()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < _LEAST_FILES
    text = f"{soft}, at most {'unlimited' if hard == resource.RLIM_INFINITY else hard}"
    yield Fact("limits", "file descriptors", text, f"ulimit -n {max(soft, 1024)}" if few else "", is_fault=few)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parent = next((path for path in (cache, os.path.dirname(cache), "/") if os.path.exists(path)), "/")
    writable = os.access(parent, os.W_OK)
    yield Fact("limits", "cache folder", f"{cache}/gemini", "" if writable else "not writable: nothing is cached")


def _parts() -> Iterator[Fact]:
    """Yield the extras of the distribution and the packages of each that are missing."""
    try:
        required = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        yield Fact("optional parts", "distribution", "not installed by pip", "pip install .")
        return
    extras: dict[str, list[str]] = {}
    for line in required:
        name, _, marker = line.partition(";")
        extra = marker.partition("extra ==")[2].strip().strip("'\"")
        package = name.strip().split("[")[0].split(">")[0].split("=")[0].split("<")[0].strip()
        if extra and package != _DISTRIBUTION:
            extras.setdefault(extra, []).append(package)
    for extra, packages in sorted(extras.items()):
        missing = [package for package in packages if not _is_installed(package)]
        if extra == "dev":
            continue
        remedy = f"pip install '{_DISTRIBUTION}[{extra}]'" if missing else ""
        yield Fact(
            "optional parts", extra, f"missing: {', '.join(missing)}" if missing else ", ".join(packages), remedy
        )


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
