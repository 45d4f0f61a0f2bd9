"""Stage writer: a partitioned model as files, without pickles and without weights."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from gemini.pipe.manifest import ARRAYS, GRAPH, NAME, PARTITION, PROFILE, make_manifest
from gemini.pipe.stage_folder import check_replaceable, write_folder

if TYPE_CHECKING:
    from gemini.ir.graph import Graph
    from gemini.pipe.piped_model import Piped


def save_piped(piped: Piped, folder: str | Path, *, overwrite: bool = False) -> Path:
    """Write the folder of a partitioned model."""
    target = Path(folder)
    check_replaceable(target, overwrite)
    files = {name: text.encode() for name, text in piped.sources.items()}
    files |= _graph_files(piped.graph)
    files[PARTITION] = _json(piped.partition.to_json())
    files[PROFILE] = _json(piped.profile.to_json())
    files[NAME] = _json(make_manifest(piped, files))
    write_folder(target, files, overwrite)
    return target


def _json(data: object) -> bytes:
    return (json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def _graph_files(graph: Graph) -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as scratch:
        graph.save(Path(scratch) / GRAPH)
        return {name: path.read_bytes() for name in (GRAPH, ARRAYS) if (path := Path(scratch) / name).exists()}
