"""Serialization: a graph as a JSON file, with a safetensors file beside it where it holds arrays.

Weights are not stored: to run, a loaded graph is attached to the model that it was captured from. Without one it can
be inspected, partitioned and drawn.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path as FilePath
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from gemini.errors import ArtifactError
from gemini.ir.autograd_modes import Region
from gemini.ir.codec import Reader, Writer
from gemini.ir.graph import Graph
from gemini.ir.node import Guard, Node, TensorMeta
from gemini.ir.validity import Validity, describe_state

VERSION = 5
_PLAIN_FIELDS = ("id", "kind", "name", "target", "line", "cls", "random", "checkpoint", "recomputed", "reason",
                 "role")  # fmt: skip
_UNREADABLE = (OSError, ValueError, KeyError, TypeError, IndexError, ImportError, AttributeError, RecursionError,
               SafetensorError)  # fmt: skip


def save_graph(graph: Graph, path: str | FilePath) -> None:
    """Write a graph to `path`."""
    path, writer = FilePath(path), Writer()
    regions: dict[Region, int] = {}
    for node in graph.nodes:
        if node.region is not None:
            regions.setdefault(node.region, len(regions))
    data = {
        "gemini graph": VERSION,
        "torch": torch.__version__,
        "model": graph.model_name,
        "batch_size": graph.batch_size,
        "rolled": graph.rolled,
        "wholes": list(graph.whole_batch_guards),
        "pins": list(graph.pins),
        "blocks": graph.blocks,
        "calls": graph.calls,
        "checked": graph.checked,
        "settings": graph.settings,
        "inputs": [[node, writer(route)] for node, route in graph.inputs.items()],
        "regions": [asdict(region) for region in regions],
        "nodes": [_write_node(node, writer, regions) for node in graph.nodes],
        "guards": [
            [writer(g.expr), writer(g.expected), g.position, list(g.scope), g.line, g.data, g.concrete]
            for g in graph.guards
        ],
        "result": writer(graph.result),
        "validity": _write_validity(graph, writer),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False))
    arrays = path.with_suffix(".safetensors")
    if writer.arrays:
        save_file(writer.arrays, str(arrays))
    else:
        arrays.unlink(missing_ok=True)


def _write_node(node: Node, writer: Writer, regions: dict[Region, int]) -> dict[str, Any]:
    data: dict[str, Any] = {field: getattr(node, field) for field in _PLAIN_FIELDS}
    data |= {
        "sketch": node.out_spec,
        "args": writer(node.args),
        "kwargs": writer(node.kwargs),
        "region": None if node.region is None else regions[node.region],
        "scope": list(node.scope),
        "outputs": [[source, writer(route), asdict(meta)] for (source, route), meta in node.outputs.items()],
        "mutates": [writer(ref) for ref in node.mutates],
        "after": list(node.after),
        "uses": list(node.uses),
        "shares": list(node.shares),
        "changes": list(node.changes),
    }
    return data


def _write_validity(graph: Graph, writer: Writer) -> Any:
    validity = graph.validity
    if validity is None:
        return None
    return {
        "signature": writer(validity.signature),
        "batch": {name: list(where) for name, where in validity.batch.items()},
        "region": asdict(validity.region),
        "glue": validity.glue,
        "state": describe_state(validity.fingerprint) if graph.awaited_state is None else graph.awaited_state,
    }


def load_graph(path: str | FilePath) -> Graph:
    """Read a graph, without a model."""
    path = FilePath(path)
    try:
        data = json.loads(path.read_text())
        if not isinstance(data, dict) or data.get("gemini graph") != VERSION:
            raise ArtifactError(f"{path} is not a graph of version {VERSION}\n    → capture the model again")
        arrays = path.with_suffix(".safetensors")
        reader = Reader(load_file(str(arrays)) if arrays.exists() else {})
        return _read_graph(data, reader)
    except _UNREADABLE as error:
        if isinstance(error, FileNotFoundError):
            raise ArtifactError(f"{path} does not exist") from None
        raise ArtifactError(f"{path} cannot be read as a graph: {type(error).__name__}: {error}") from error


def _read_graph(data: dict[str, Any], reader: Reader) -> Graph:
    regions = [_region(region) for region in data["regions"]]
    return Graph(
        model_name=data["model"],
        nodes=[_read_node(node, reader, regions) for node in data["nodes"]],
        guards=[
            Guard(reader(expr), reader(expected), position, tuple(scope), line, is_data, concrete)
            for expr, expected, position, scope, line, is_data, concrete in data["guards"]
        ],
        inputs={node: reader(route) for node, route in data["inputs"]},
        result=reader(data["result"]),
        blocks=data["blocks"],
        calls=data["calls"],
        checked=data["checked"],
        batch_size=data["batch_size"],
        rolled=data["rolled"],
        whole_batch_guards=tuple(data["wholes"]),
        pins=tuple(data["pins"]),
        settings=data["settings"],
        validity=_read_validity(data["validity"], reader),
        awaited_state=None if data["validity"] is None else data["validity"]["state"],
    )


def _region(data: dict[str, Any]) -> Region:
    return Region(data["grad"], data["inference"], tuple(tuple(part) for part in data["autocast"]))


def _read_node(data: dict[str, Any], reader: Reader, regions: list[Region]) -> Node:
    node = Node(**{field: data[field] for field in _PLAIN_FIELDS}, out_spec=data["sketch"])
    node.args, node.kwargs = reader(data["args"]), reader(data["kwargs"])
    node.region = None if data["region"] is None else regions[data["region"]]
    node.scope, node.after, node.uses = tuple(data["scope"]), tuple(data["after"]), tuple(data["uses"])
    node.mutates = tuple(reader(ref) for ref in data["mutates"])
    node.shares, node.changes = tuple(data["shares"]), tuple(data["changes"])
    for source, route, meta in data["outputs"]:
        meta["shape"] = tuple(meta["shape"])
        meta["strides"] = None if meta.get("strides") is None else tuple(meta["strides"])
        meta["dynamic_dims"] = tuple(meta["dynamic_dims"])
        node.outputs[source, reader(route)] = TensorMeta(**meta)
    return node


def _read_validity(data: Any, reader: Reader) -> Validity | None:
    if data is None:
        return None
    batch = {name: (dim, factor) for name, (dim, factor) in data["batch"].items()}
    return Validity(reader(data["signature"]), batch, _region(data["region"]), data["glue"])
