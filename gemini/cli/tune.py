"""Search for the best configuration of a training step, on a described cluster or on this machine.

gemini tune --model llama3-70b --cluster h100 --devices 1024 --batch 1024 --output gemini.json --html tune.html
gemini tune --model llama3-8b --cluster h100 --max-devices 64 --batch 64 --price 2.5 --tokens 1e12 --max-hours 500
gemini tune --model llama3-8b --cluster mixed.yaml --batch 64               devices of several classes
gemini tune train.py -- --epochs 1                                           this machine: capture, search, try
gemini tune my_models.py:make_bert --workers 2 --measure 2

--fix tensor=8 fixes a degree, --among micro_batch=1,2 gives several; --explain tensor=8,pipeline=4 says why not these.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cli.counts import natural, positive
from gemini.cli.progress import ProgressBar
from gemini.cli.simulate_step import add_target_arguments, capture_with, read_inline, request_data
from gemini.errors import UsageError

if TYPE_CHECKING:
    from gemini.cluster import Cluster
    from gemini.tune.layer_cost import CostModel
    from gemini.tune.machine_costs import MachineCosts
    from gemini.tune.tuning_request import TuningRequest
    from gemini.tune.tuning_result import TuningResult

SUMMARY = "search for the best configuration of a training step"
TAKES_PROGRAM_ARGUMENTS = True  # those of the script, after --
_LISTS = ("order",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini tune`."""
    parser.add_argument("target", nargs="?", metavar="SCRIPT|MODULE:FUNCTION", help="tune this on this machine")
    add_target_arguments(parser)
    search = parser.add_argument_group("search")
    search.add_argument("--devices", type=int, metavar="N", help="number of devices (default: those of the cluster)")
    search.add_argument("--batch", type=int, metavar="N", help="sequences or samples per step")
    search.add_argument("--fix", action="append", default=[], metavar="FIELD=VALUE", help="fix a field")
    search.add_argument("--among", action="append", default=[], metavar="FIELD=A,B", help="search only these values")
    search.add_argument("--precision", metavar="NAME", help="bf16, fp8, … (default: what the devices have)")
    search.add_argument("--objective", choices=("time", "money"), default="time", help="what to minimize (time)")
    limits = parser.add_argument_group("limits")
    limits.add_argument("--max-devices", type=int, metavar="N", help="search device counts up to this")
    limits.add_argument("--max-seconds", type=float, metavar="S", help="longest step")
    limits.add_argument("--tokens", type=float, metavar="N", help="length of the training, for the next two")
    limits.add_argument("--max-money", type=float, metavar="X", help="most that the training may cost")
    limits.add_argument("--max-hours", type=float, metavar="H", help="longest training")
    limits.add_argument("--memory-share", type=float, default=1.0, metavar="X", help="share of the memory to use (1)")
    local = parser.add_argument_group("on this machine")
    local.add_argument("--workers", type=positive, default=2, metavar="N", help="worker processes, at most (2)")
    local.add_argument("--measure", type=natural, default=2, metavar="N", help="run the best N for real (2)")
    local.add_argument("--steps", type=positive, default=6, metavar="N", help="steps of such a run (6)")
    output = parser.add_argument_group("output")
    output.add_argument(
        "--output", type=Path, metavar="FILE", help="write the configuration for gemini_python --config"
    )
    output.add_argument("--request", type=Path, metavar="FILE", help="write the best for gemini simulate")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with ranking and frontier")
    output.add_argument("--json", action="store_true", help="print JSON instead of a table")
    output.add_argument("--rows", type=positive, default=10, metavar="N", help="rows of the table (10)")
    output.add_argument("--explain", metavar="FIELD=VALUE,…", help="say why this configuration was not chosen")


def run(args: argparse.Namespace) -> int:
    """Search, try the best where the devices are here, and write what was requested."""
    is_local = args.target is not None and args.cluster is None
    if args.target is not None and (args.model or args.capture):
        raise UsageError(f"{args.target} together with --model or --capture\n    → name one model")
    with ProgressBar() as bar:
        request = _local_request(args, bar) if is_local else _cluster_request(args, bar)
        result = _search(request, bar)
        if is_local and args.measure > 0 and not result.stopped:
            result = _run_trials(args, result, bar)
        _write(args, result, bar)
    print(json.dumps(result.to_json(), indent=1) if args.json else result.table(args.rows))
    _print_notes(args, result)
    return 0


def _search(request: TuningRequest, bar: ProgressBar) -> TuningResult:
    if not request.cluster.is_homogeneous:
        from gemini.tune.mixed_cluster import tune_mixed

        return tune_mixed(request, progress=bar.update)
    from gemini.tune.tuner import tune

    return tune(request, progress=bar.update)


# ── the request ──────────────────────────────────────────────────────────────────────────────────────────────────────
def _cluster_request(args: argparse.Namespace, bar: ProgressBar) -> TuningRequest:
    from gemini.cluster import read_cluster
    from gemini.tune.simulation_request import default_precision, read_model

    if args.target is not None:
        args.capture = args.target
    data = request_data(argparse.Namespace(**{**vars(args), "request": None}))
    cluster = read_cluster(data["cluster"])
    if args.devices is not None:
        cluster = cluster.resized(args.devices)
    if args.max_devices is not None and cluster.is_homogeneous:
        cluster = cluster.resized(_whole_hosts(cluster, args.max_devices))
    precision = args.precision or default_precision(cluster)
    model = read_model(data["model"], cluster, precision, capture_with(bar), data.get("sequence"))
    batch = args.batch or getattr(model, "samples", 0) or 4 * cluster.devices
    return _make_request(args, model, cluster, batch)


def _whole_hosts(cluster: Cluster, devices: int) -> int:
    per_host = max(1, cluster.groups[0].devices_per_host)
    return devices if devices <= per_host else devices // per_host * per_host


def _local_request(args: argparse.Namespace, bar: ProgressBar) -> TuningRequest:
    from gemini.tune.machine_search import machine_request

    bar.step("capture and profile")
    model = _capture_local(args)
    fixed = {**({"precision": args.precision} if args.precision else {}), **_fields(args.fix)}
    return machine_request(
        model, args.workers, args.batch or model.samples, fixed=fixed, among=_sets(args.among),
        max_seconds=args.max_seconds, max_money=args.max_money, max_hours=args.max_hours, tokens=args.tokens,
        memory_share=args.memory_share, objective=args.objective,
    )  # fmt: skip


def _capture_local(args: argparse.Namespace) -> MachineCosts:
    if ":" in args.target:
        from gemini.cli.batch_errors import report_batch_errors
        from gemini.cli.profile import make_model
        from gemini.tune.machine_capture import capture_machine_costs

        model, batch, keywords = make_model(args.target)
        with report_batch_errors(args.target, model, batch, keywords):
            return capture_machine_costs(model, batch, keywords, args.workers)
    if not Path(args.target).is_file():
        raise UsageError(f"no file {args.target}\n    → name a script, or module:function")
    from gemini.cli.tune_worker import FAULT
    from gemini.tune.machine_costs import load_costs

    with tempfile.TemporaryDirectory(prefix="gemini-tune-") as folder:
        out = Path(folder) / "costs.json"
        command = [
            sys.executable,
            "-m",
            "gemini.cli.tune_worker",
            "capture",
            str(out),
            str(args.workers),
            args.target,
            *args.program_arguments,
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
        if not out.is_file():
            _, known, fault = done.stderr.decode(errors="replace").rpartition(FAULT)
            last = fault.strip().splitlines()[-1:] or ["it trained no torch model"]
            what = fault.strip() if known else f"{last[0]}\n    → check that it runs under python"
            raise UsageError(f"{args.target} cannot be captured: {what}")
        return load_costs(out)


def _make_request(args: argparse.Namespace, model: CostModel, cluster: Cluster, batch: int) -> TuningRequest:
    from gemini.tune.simulation_request import default_precision
    from gemini.tune.tuning_request import TuningRequest

    fixed = {"precision": args.precision or default_precision(cluster), **_fields(args.fix)}
    return TuningRequest(
        model, cluster, batch, fixed, _sets(args.among), max_devices=args.max_devices, max_seconds=args.max_seconds,
        max_money=args.max_money, max_hours=args.max_hours, tokens=args.tokens, memory_share=args.memory_share,
        objective=args.objective,
    )  # fmt: skip


def _sets(given: list[str]) -> dict[str, tuple[Any, ...]]:
    return {
        name: tuple(tuple(one.split("-")) if name in _LISTS else _value(one) for one in text.split(","))
        for name, text in map(_pair, given)
    }


def _fields(given: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, text in map(_pair, given):
        found[name] = tuple(text.split("-")) if name in _LISTS else _value(text)
    return found


def _pair(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name or not value:
        raise UsageError(f"{text!r} is no field with a value\n    → write tensor=8")
    return name.strip().replace("-", "_"), value.strip()


def _value(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("true", "false"):
        return lowered == "true"
    for reader in (int, float):
        try:
            return reader(text)
        except ValueError:
            continue
    return text


# ── trials and output ────────────────────────────────────────────────────────────────────────────────────────────────
def _run_trials(args: argparse.Namespace, result: TuningResult, bar: ProgressBar) -> TuningResult:
    from gemini.tune.trial_runs import TrialTarget, run_trials

    bar.step(f"run the best {args.measure}")
    return run_trials(result, TrialTarget(args.target, tuple(args.program_arguments), args.steps), args.measure)


def _write(args: argparse.Namespace, result: TuningResult, bar: ProgressBar) -> None:
    from gemini.atomic_files import write_whole

    if args.output:
        from gemini.tune.run_settings import write_run_config

        write_run_config(result.best, args.output)
    if args.request:
        best = result.best
        model = read_inline(args.model) if args.model else {"capture": args.capture or args.target}
        sequence = {} if args.sequence is None else {"sequence": args.sequence}
        content = {"model": model, "cluster": best.cluster.to_dict(), "parallel": best.config.to_dict(), **sequence}
        write_whole(args.request, json.dumps(content, indent=1) + "\n")
    if args.html:
        from gemini.tune.tuning_page import write_tuning_page

        bar.step("draw")
        write_tuning_page(result, args.html)


def _explain(result: TuningResult, values: dict[str, Any]) -> str:
    """Return why the best configuration with these values was not chosen, or why there is none."""
    from gemini.errors import ConfigError
    from gemini.nearest_name import remedy
    from gemini.tune.simulation_request import config_fields

    if unknown := [name for name in values if name not in config_fields()]:
        raise UsageError(f"--explain: unknown field {unknown[0]!r}\n    → {remedy(unknown[0], config_fields())}")
    among = {name: given for name, given in result.request.among.items() if name not in values}
    fixed = {**result.request.fixed, **values}
    named = ", ".join(f"{name} {value}" for name, value in values.items())
    try:
        request = replace(result.request, fixed=fixed, among=among, finalists=1, composed=0)
        with ProgressBar() as bar:
            return f"why not {named}\n  {result.compare(_search(request, bar).best)}"
    except ConfigError as error:
        return f"why not {named}\n  " + "\n  ".join(f"{fault.what}; {fault.remedy}" for fault in error.faults)


def _print_notes(args: argparse.Namespace, result: TuningResult) -> None:
    from gemini.tune.run_settings import omitted_settings

    best = result.best
    if args.explain:
        print(f"\n{_explain(result, _fields(args.explain.split(',')))}")
    if args.output and not args.json:
        omitted = omitted_settings(best.config)
        print(f"\nwritten: {args.output}" + (f" (not part of it: {'; '.join(omitted)})" if omitted else ""))
