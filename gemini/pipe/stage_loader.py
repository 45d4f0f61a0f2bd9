"""Stage loader: a saved folder and its model become a `Piped` again.

Only bytes whose hash matches the manifest are executed. All files that do not match are listed.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from gemini.cache_files import software_versions
from gemini.capture.entry import attach_model
from gemini.capture.python_state import fingerprint
from gemini.codegen import StageCode, generate_stages, interfaces
from gemini.errors import ArtifactError
from gemini.ir.graph import Graph
from gemini.ir.serialize import load_graph
from gemini.ir.validity import describe_differences, describe_state
from gemini.partition.assignment import Partition
from gemini.pipe.manifest import ARRAYS, GRAPH, PARTITION, PROFILE
from gemini.pipe.piped_model import Piped
from gemini.pipe.stage_folder import FolderContents, read_folder
from gemini.profiling.profile_result import Profile

if TYPE_CHECKING:
    from gemini.codegen.stage_interface import Interface

_REGENERATE = "Piped.load(folder, model, regenerate=True) generates the stages again from graph and partition"


def load_piped(folder: str | Path, model: nn.Module, *, regenerate: bool = False) -> Piped:
    """Read a saved folder."""
    path = Path(folder).absolute()
    if not isinstance(model, nn.Module):
        raise ArtifactError(f"a saved partition is loaded for a model, not a {type(model).__name__}")
    contents = read_folder(path)
    if regenerate:
        return _regenerate(path, model)
    if contents.changed:
        listed = "\n".join(f"  - {line}" for line in contents.changed)
        raise ArtifactError(
            f"{path} has changed since it was written:\n{listed}\n    → restore the files, or {_REGENERATE}"
        )
    _warn_versions(path, contents.manifest["made"])
    graph, partition, profile = _read_parts(contents.files, path, model)
    _warn_state(graph)
    interfaces_now = interfaces(graph, partition)
    return Piped(model, graph, profile, partition, _stage_codes(contents, interfaces_now, path), folder=path)


def _regenerate(path: Path, model: nn.Module) -> Piped:
    names = (GRAPH, ARRAYS, PARTITION, PROFILE)
    files = {name: file.read_bytes() for name in names if (file := path / name).is_file()}
    missing = [name for name in (GRAPH, PARTITION, PROFILE) if name not in files]
    if missing:
        raise ArtifactError(
            f"{path} cannot be generated again without {', '.join(missing)}\n    → pipe the model again"
        )
    graph, partition, profile = _read_parts(files, path, model)
    _warn_state(graph)
    partition.validate(graph)  # the user may have edited it on purpose
    made = Piped(model, graph, profile, partition, generate_stages(graph, partition), folder=path)
    made.save(path, overwrite=True)
    return made


def _read_parts(files: dict[str, bytes], path: Path, model: nn.Module) -> tuple[Graph, Partition, Profile]:
    with tempfile.TemporaryDirectory() as scratch:
        for name in (GRAPH, ARRAYS):
            if name in files:
                (Path(scratch) / name).write_bytes(files[name])
        graph = attach_model(load_graph(Path(scratch) / GRAPH), model, any_state=True)
    partition = Partition.from_json(_json(files, PARTITION, path))
    return graph, partition, Profile.from_json(_json(files, PROFILE, path))


def _json(files: dict[str, bytes], name: str, path: Path) -> Any:
    try:
        return json.loads(files[name])
    except ValueError as error:
        raise ArtifactError(f"{path / name} is not JSON: {error}\n    → pipe the model again") from error


def _stage_codes(contents: FolderContents, interfaces_now: tuple[Interface, ...], path: Path) -> tuple[StageCode, ...]:
    """Return the generated source, if its interfaces are those of graph and partition."""
    described = contents.manifest["stages"]
    wanted = [([p.name for p in face.inputs], [p.name for p in face.outputs]) for face in interfaces_now]
    if wanted != [(stage["inputs"], stage["outputs"]) for stage in described]:
        raise ArtifactError(f"{path} is stale: its stages have other inputs and outputs\n    → {_REGENERATE}")
    return tuple(
        StageCode(
            interface=face,
            class_name=stage["class"],
            source=contents.files[stage["file"]].decode(),
            parameters=tuple(stage["parameters"]),
            buffers=tuple(stage["buffers"]),
        )
        for face, stage in zip(interfaces_now, described, strict=True)
    )


def _warn_versions(path: Path, made: dict[str, Any]) -> None:
    now = software_versions()
    other = [f"{name} {made[name]} (now {now[name]})" for name in ("gemini", "torch") if made.get(name) != now[name]]
    if other:
        warnings.warn(f"gemini: {path} was made with {', '.join(other)}; {_REGENERATE}", UserWarning, stacklevel=4)


def _warn_state(graph: Graph) -> None:
    """Warn where the model is in another state: a fresh one may reach it by its first call, or by `train()`."""
    if graph.awaited_state is not None and graph.validity is not None:
        now = describe_state(fingerprint(graph.bound_model(), graph.validity.glue))
        listed = "".join(f"\n  - {line}" for line in list(describe_differences(graph.awaited_state, now))[:4])
        warnings.warn(
            f"gemini: {graph.model_name} is not in the state of its stages; until it is, calls run the original model:"
            f"{listed}",
            UserWarning,
            stacklevel=5,
        )
