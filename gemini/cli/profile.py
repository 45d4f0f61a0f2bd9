"""Profile a model: time and memory of every node, measured on this machine or estimated for another device.

gemini profile my_package.models:make_bert
gemini profile model.py:make --depth 2 --json > profile.json
gemini profile model.py:make --device cuda --basic-block BertLayer --save profile.json
gemini profile model.py:make --analytic h100
gemini profile --link                                          the link between two workers on this machine

The function returns (model, args) or (model, args, kwargs): a model and one batch.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gemini.cli.batch_errors import report_batch_errors
from gemini.cli.counts import positive
from gemini.cli.progress import ProgressBar
from gemini.errors import ProfileError, UsageError
from gemini.nearest_name import remedy
from gemini.torch_range import check_torch

if TYPE_CHECKING:
    from gemini.profiling.profile_result import Profile

SUMMARY = "measure or estimate the time and memory of every part of a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini profile`."""
    parser.add_argument(
        "target", nargs="?", metavar="MODULE:FUNCTION", help="or FILE.py:FUNCTION; returns the model and a batch"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1 … (default: the device of the model)")
    parser.add_argument(
        "--analytic", metavar="NAME", help="estimate for a described device such as h100, without running the model"
    )
    parser.add_argument("--depth", type=int, metavar="N", help="do not trace into modules nested deeper than N")
    parser.add_argument(
        "--basic-block", action="append", default=[], metavar="CLASS", help="do not trace into this class"
    )
    parser.add_argument("--rounds", type=positive, default=3, metavar="N", help="measurement rounds (3)")
    parser.add_argument("--rows", type=positive, default=40, metavar="N", help="rows of the table (40)")
    parser.add_argument("--no-cache", action="store_true", help="ignore cached measurements")
    parser.add_argument("--link", action="store_true", help="measure the link between two worker processes")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the profile as JSON")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Profile, and show or write the result."""
    if args.link:
        return _link(args)
    if args.target is None:
        raise UsageError("no model to profile\n    → name one: gemini profile package.module:function, or use --link")
    from gemini.profiling.profile_table import profile_text

    found = _profile(args)
    if args.save:
        found.save(args.save)
    print(json.dumps(found.to_json(), indent=1) if args.json else profile_text(found, args.rows))
    return 0


def _profile(args: argparse.Namespace) -> Profile:
    from gemini.capture import capture
    from gemini.profiling import find_device, profile
    from gemini.profiling.device_specs import find_spec

    if args.device is not None:
        find_device(args.device)  # raises before the model is built
    if args.analytic is not None:
        find_spec(args.analytic)
    model, batch, keywords = make_model(args.target)
    with ProgressBar() as bar:
        bar.update(0, 1, "capture")
        with report_batch_errors(args.target, model, batch, keywords):
            graph = capture(model, batch, keywords, depth=args.depth, basic_blocks=tuple(args.basic_block))
        return profile(
            graph, batch, keywords, device=args.device, analytic=args.analytic, rounds=args.rounds,
            cache=not args.no_cache, progress=bar.update,
        )  # fmt: skip


def _link(args: argparse.Namespace) -> int:
    from gemini.profiling.link_profile import profile_link

    link = profile_link()
    if args.save:
        link.save(args.save)
    if args.json:
        print(json.dumps({"backend": link.backend, "latency_ms": link.latency_ms, "bandwidth": link.bandwidth,
                          "sizes": link.sizes, "times_ms": link.times_ms}, indent=1))  # fmt: skip
        return 0
    for size, ms in zip(link.sizes, link.times_ms, strict=True):
        print(f"{size / 1024:10.0f} KB  {ms:9.3f} ms")
    print(
        f"latency {link.latency_ms:.3f} ms, bandwidth {link.bandwidth / 1e6:.2f} GB/s ({link.backend}, two processes)"
    )
    return 0


# ---------------------------------------------------------------- the model


def make_model(target: str) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Call the function named on the command line; its errors pass through."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name:
        raise UsageError(f"{target!r} does not name a function\n    → write module:function or file.py:function")
    check_torch()
    module = _load(where)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UsageError(f"{where} has no function {name!r}\n    → {remedy(name, sorted(functions))}")
    return _unpack(target, function)


def _load(where: str) -> ModuleType:
    if not where.endswith(".py"):
        sys.path.insert(0, "")
        try:
            return importlib.import_module(where)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{where}.".startswith(f"{error.name}."):
                raise
            raise UsageError(f"no module {where!r}\n    → for a file write path/to/file.py:function") from error
    path = Path(where)
    if not path.is_file():
        raise UsageError(f"no file {where}\n    → name an existing file, or module:function")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{where} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # pickle finds classes by module name
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _unpack(target: str, function: Callable[[], Any]) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    from torch import nn

    made = function()
    if isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module):
        batch, keywords = made[1], made[2] if len(made) == 3 else {}
        if isinstance(batch, dict) and len(made) == 2:
            batch, keywords = (), batch
        if isinstance(batch, (tuple, list)) and isinstance(keywords, dict):
            return made[0], tuple(batch), keywords
    shape = f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__
    raise ProfileError(f"{target} returned {shape}\n    → return (model, args) or (model, args, kwargs)")
