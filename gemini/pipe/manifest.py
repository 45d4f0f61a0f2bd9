"""Manifest: the contents of a stage folder and the interfaces of its stages, readable without the model.

| key          | value                                                                                             |
|--------------|---------------------------------------------------------------------------------------------------|
| `made`       | provenance: model class, versions, partitioner, options, device of the profile                    |
| `values`     | every value that enters or leaves a stage: from, to, shape, dtype, gradient, batch dimension       |
| `inputs`     | the arguments of the call; `outputs`: the values that the stages return to the caller             |
| `stages`     | file, class, worker, names of inputs and outputs in order, parameters and buffers                  |
| `links`      | sender, receiver and values of every transfer                                                     |
| `parameters`, `buffers` | name → stages; `tied` names are one tensor; `sync`: gradients of several stages are summed |
| `files`      | file → SHA-256 of its contents; `hash` is that of the manifest without this key                    |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from gemini.cache_files import software_versions
from gemini.errors import ArtifactError
from gemini.ir.pytree import Ref
from gemini.pipe.live_stages import stage_file

if TYPE_CHECKING:
    from gemini.codegen.stage_interface import Interface, Port
    from gemini.pipe.piped_model import Piped

FORMAT = 2
NAME = "manifest.json"
GRAPH, ARRAYS, PROFILE, PARTITION = "graph.json", "graph.safetensors", "profile.json", "partition.json"


def hash_content(content: bytes) -> str:
    """Return the SHA-256 of the contents of a file."""
    return hashlib.sha256(content).hexdigest()


def make_manifest(piped: Piped, files: dict[str, bytes]) -> dict[str, Any]:
    """Return the manifest of a partitioned model with these other files."""
    data: dict[str, Any] = {
        "gemini pipe": FORMAT,
        "made": _provenance(piped),
        "inputs": {
            ".".join(str(step[1]) for step in path): _argument(piped, at) for at, path in piped.graph.inputs.items()
        },
        "outputs": [name for name, port in piped.routes.ports.items() if port.is_result],
        "values": {name: _value(port) for name, port in piped.routes.ports.items()},
        "stages": [_stage(piped, at) for at in range(len(piped.codes))],
        "links": _links(piped.interfaces),
        "parameters": _tensors(piped, dict(piped.model.named_parameters(remove_duplicate=False))),
        "buffers": _tensors(piped, dict(piped.model.named_buffers(remove_duplicate=False))),
        "files": {name: hash_content(content) for name, content in files.items()},
    }
    return {**data, "hash": hash_manifest(data)}


def hash_manifest(data: dict[str, Any]) -> str:
    """Return the SHA-256 of a manifest without its own hash."""
    body = {key: value for key, value in data.items() if key != "hash"}
    return hash_content(json.dumps(body, sort_keys=True).encode())


def _provenance(piped: Piped) -> dict[str, Any]:
    cls = type(piped.model)
    return {
        "model": f"{cls.__module__}.{cls.__qualname__}",
        **software_versions(),
        "partitioner": piped.partition.partitioner,
        "nparts": piped.partition.nparts,
        "options": piped.partition.options,
        "capture": piped.graph.settings,
        "profile": {"device": piped.profile.device, "mode": piped.profile.mode},
    }


def _value(port: Port) -> dict[str, Any]:
    data: dict[str, Any] = {"from": "call" if port.source is None else port.source, "to": list(port.targets)}
    data["output"] = port.is_result
    if port.meta is None:
        return data | {"kind": "number"}
    meta = port.meta
    return data | {
        "kind": "tensor",
        "shape": list(meta.shape),
        "dtype": meta.dtype,
        "gradient": meta.requires_grad,
        "batch_dim": meta.batch_dim,
        "batch_factor": meta.batch_factor,
    }


def _argument(piped: Piped, node: int) -> dict[str, Any]:
    """Describe an argument of the call and the stages that read it."""
    meta = piped.graph.nodes[node].outputs["ret", ()]
    ports = [port for port in piped.routes.from_call if isinstance(port.value, Ref) and port.value.node == node]
    return {
        "names": [port.name for port in ports],
        "to": sorted({stage for port in ports for stage in port.targets}),
        "shape": list(meta.shape),
        "dtype": meta.dtype,
        "gradient": meta.requires_grad,
        "batch_dim": meta.batch_dim,
        "batch_factor": meta.batch_factor,
    }


def _stage(piped: Piped, at: int) -> dict[str, Any]:
    code = piped.codes[at]
    return {
        "stage": at,
        "worker": code.interface.worker,
        "file": stage_file(at),
        "class": code.class_name,
        "inputs": [port.name for port in code.interface.inputs],
        "outputs": [port.name for port in code.interface.outputs],
        "parameters": list(code.parameters),
        "buffers": list(code.buffers),
    }


def _links(interfaces: Iterable[Interface]) -> list[dict[str, Any]]:
    found: dict[tuple[Any, int], list[str]] = {}
    for interface in interfaces:
        for port in interface.inputs:
            found.setdefault(("call" if port.source is None else port.source, interface.stage), []).append(port.name)
    return [{"from": source, "to": target, "values": names} for (source, target), names in found.items()]


def _tensors(piped: Piped, held: dict[str, torch.Tensor]) -> dict[str, Any]:
    names: dict[int, list[str]] = {}
    for name, tensor in held.items():
        names.setdefault(id(tensor), []).append(name)
    names_of_stage = [{*code.parameters, *code.buffers} for code in piped.codes]
    found: dict[str, Any] = {}
    for name, tensor in held.items():
        aliases = names[id(tensor)]
        stages = [at for at, held in enumerate(names_of_stage) if name in held]
        everywhere = {at for at, held in enumerate(names_of_stage) if held & set(aliases)}
        found[name] = {
            "stages": stages,
            "shape": list(tensor.shape),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "gradient": tensor.requires_grad,
        }
        if len(aliases) > 1:
            found[name]["tied"] = aliases
        if tensor.requires_grad and len(everywhere) > 1:
            found[name]["sync"] = sorted(everywhere)
    return found


def parse_manifest(content: bytes, where: str) -> dict[str, Any]:
    """Parse a manifest; raises ArtifactError where it is no manifest or was edited."""
    again = "pipe the model again, or restore the file"
    try:
        data = json.loads(content)
    except ValueError as error:
        raise ArtifactError(f"{where} is not JSON: {error}\n    → {again}") from error
    if not isinstance(data, dict) or data.get("gemini pipe") != FORMAT:
        found = data.get("gemini pipe") if isinstance(data, dict) else type(data).__name__
        raise ArtifactError(f"{where} is not a manifest of format {FORMAT}: {found!r}\n    → {again}")
    if data.get("hash") != hash_manifest(data):
        raise ArtifactError(f"{where} was edited: its hash does not match\n    → {again}")
    return data
