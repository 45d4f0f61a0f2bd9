"""Predict the time and the memory of a training step on a cluster, without the cluster.

gemini simulate --model llama3-70b --cluster h100 --devices 256 --batch 512 --tensor 8 --zero 3 --recompute full
gemini simulate config.json --devices 1024 --trace step.json --html step.html
gemini simulate --capture my_models.py:make_bert --cluster a100 --devices 4 --batch 32 --pipeline 4
gemini simulate --calibrate cuda=h100                    measure the efficiencies of a device class here
gemini simulate --list                                   the models, devices and clusters that have names

config.json is {"model": …, "cluster": …, "parallel": {"devices": …, "batch": …, "tensor": …}}; flags win over it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemini.cli.progress import ProgressBar
from gemini.errors import UsageError

if TYPE_CHECKING:
    from gemini.cluster import Cluster
    from gemini.tune.layer_cost import CostModel

SUMMARY = "predict time and memory of a training step on a cluster"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini simulate`."""
    parser.add_argument("request", nargs="?", type=Path, metavar="FILE", help="request, as JSON or YAML")
    add_target_arguments(parser)
    add_parallel_arguments(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print JSON instead of text")
    output.add_argument("--html", type=Path, metavar="FILE", help="write a page with pictures")
    output.add_argument("--trace", type=Path, metavar="FILE", help="write the timeline for https://ui.perfetto.dev")
    output.add_argument("--all-ranks", action="store_true", help="in the timeline: every rank, not one per stage")
    output.add_argument(
        "--calibrate",
        metavar="DEVICE=NAME",
        help="measure the device class NAME on DEVICE (cuda=h100); print it as JSON",
    )
    output.add_argument("--list", action="store_true", help="list the models, devices and clusters that have names")


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that name model and cluster."""
    what = parser.add_argument_group("model and cluster")
    what.add_argument("--model", metavar="NAME", help="a model with a name, or JSON with its sizes")
    what.add_argument("--sequence", type=int, metavar="N", help="tokens of a sequence")
    what.add_argument("--capture", metavar="MODULE:FUNCTION", help="capture this model, also on the meta device")
    what.add_argument("--cluster", metavar="NAME", help="a cluster with a name, or a JSON or YAML file")
    what.add_argument("--price", type=float, metavar="X", help="price of a device and hour")


def add_parallel_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a flag per field of the parallel configuration."""
    from gemini.tune.parallel_config import SWITCHES, ParallelConfig

    group = parser.add_argument_group("parallel configuration")
    readers: dict[str, Any] = {"int": int, "float": float, "str": str, "int | None": int}
    for entry in fields(ParallelConfig):
        flag, kind = "--" + entry.name.replace("_", "-"), str(entry.type)
        if entry.name in SWITCHES:
            group.add_argument(flag, action=argparse.BooleanOptionalAction, default=None)
        elif entry.name == "order":
            group.add_argument(flag, metavar="AXES", help="axes, innermost first: tensor,context,data,pipeline")
        else:
            group.add_argument(flag, type=readers[kind], metavar="NAME" if kind == "str" else "N")


def run(args: argparse.Namespace) -> int:
    """Simulate and show the prediction."""
    from gemini.tune.simulation_request import read_simulation
    from gemini.tune.step_report import step_json, step_text
    from gemini.tune.step_simulation import simulate

    if args.list:
        print(list_names())
        return 0
    if args.calibrate:
        print(json.dumps(calibrate(args.calibrate, args.precision), indent=1))
        return 0
    data = request_data(args)
    with ProgressBar() as bar:
        request = read_simulation(data, parallel_flags(args), str(args.request or "request"), capture_with(bar))
        bar.step("simulate")
        result = simulate(request.model, request.cluster, request.config, layout=request.layout)
        if args.trace:
            from gemini.tune.step_timeline import save_timeline

            save_timeline(result, args.trace, all_ranks=args.all_ranks)
        if args.html:
            from gemini.tune.step_page import write_step_page

            bar.step("draw")
            write_step_page(result, args.html)
    print(json.dumps(step_json(result), indent=1) if args.json else step_text(result))
    return 0


def request_data(args: argparse.Namespace) -> dict[str, Any]:
    """Return the request of the file with what the flags replace."""
    from gemini.tune.simulation_request import read_request_file

    data = read_request_file(args.request) if args.request else {}
    if args.model is not None and args.capture is not None:
        raise UsageError("--model together with --capture\n    → name one model")
    if args.model is not None:
        data["model"] = read_inline(args.model)
    if args.capture is not None:
        data["model"] = {"capture": args.capture}
    if args.cluster is not None:
        data["cluster"] = read_inline(args.cluster)
    if args.sequence is not None:
        data["sequence"] = args.sequence
    if "model" not in data or "cluster" not in data:
        missing = " and ".join(f"--{name}" for name in ("model", "cluster") if name not in data)
        raise UsageError(f"no {missing}\n    → name both, or a file with a request; gemini simulate --list has names")
    if args.price is not None:
        data["cluster"] = with_price(data["cluster"], args.price)
    return data


def read_inline(text: str) -> Any:
    """Return JSON where the text is an object, else the text."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UsageError(f"not JSON: {error.msg} in {text!r}\n    → quote the object for the shell") from error


def with_price(cluster: Any, price: float) -> dict[str, Any]:
    """Return a cluster whose devices all have this price."""
    from gemini.cluster import read_cluster

    plain = read_cluster(cluster).to_dict()
    for group in plain["groups"]:  # type: ignore[attr-defined]
        group["device"]["price_per_hour"] = price
    return plain


def parallel_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the given fields of the parallel configuration."""
    from gemini.tune.simulation_request import config_fields

    given = {name: getattr(args, name) for name in config_fields() if getattr(args, name, None) is not None}
    if "order" in given:
        given["order"] = tuple(given["order"].split(","))
    return given


def capture_with(bar: ProgressBar) -> Any:
    """Return the function that captures a model named on the command line."""

    def capture(target: str, cluster: Cluster, precision: str) -> CostModel:
        from gemini.cli.batch_errors import report_batch_errors
        from gemini.cli.profile import make_model
        from gemini.tune.model_capture import capture_model

        bar.step("build the model")
        model, batch, keywords = make_model(target)
        bar.step("capture")
        with report_batch_errors(target, model, batch, keywords):
            return capture_model(model, batch, keywords, cluster, precision=precision, progress=bar.update)

    return capture


def calibrate(text: str, precision: str | None) -> dict[str, object]:
    """Return a device class with efficiencies measured on a device of this machine."""
    from gemini.cluster.cluster_file import find_device_class
    from gemini.tune.device_calibration import calibrate_device

    device, equals, name = text.partition("=")
    if not equals or not device or not name:
        raise UsageError(f"--calibrate {text!r}\n    → write device=class, as in cuda=h100 or cpu=cpu")
    base = find_device_class(name)
    default = "bf16" if device.startswith("cuda") and "bf16" in base.tflops else "fp32"
    return calibrate_device(base, device, precision or default).to_dict()


def list_names() -> str:
    """Return the named models, devices and clusters."""
    from gemini.cluster.cluster_file import presets
    from gemini.tune.transformer_model import find_transformer, model_presets

    known = presets()
    lines = ["models"]
    for name in model_presets():
        model = find_transformer(name)
        lines.append(
            f"  {name:<18}{model.parameters / 1e9:>8.1f} B, {model.layers} layers of {model.hidden}, "
            f"{model.sequence} tokens"
        )
    lines += ["devices", "  " + ", ".join(known["devices"]), "clusters", "  " + ", ".join(known["clusters"])]
    return "\n".join(lines)
