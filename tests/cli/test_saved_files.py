"""Files that a script saves under `gemini_python` have the structure of those it saves under `python`."""

from __future__ import annotations

import io
import os
import pickletools
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("saved_files.py")
COMMAND = str(Path(sys.executable).with_name("gemini_python"))
FORCED = ("--mode", "pipeline", "--workers", "2")


def run(folder: Path, *command: str) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache")}
    done = subprocess.run(
        [*command, str(SCRIPT), "saved"], cwd=folder, env=environment, capture_output=True, text=True, timeout=120,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The files of `python`, and of `gemini_python`."""
    plain, workers = (tmp_path_factory.mktemp(name) for name in ("python", "gemini"))
    run(plain, sys.executable)
    run(workers, COMMAND, *FORCED)
    explained = subprocess.run(
        [COMMAND.replace("gemini_python", "gemini"), "explain"], cwd=workers, capture_output=True, text=True, check=True
    )
    assert "overlapped" in explained.stdout  # workers ran the steps
    return plain / "saved", workers / "saved"


def opcodes(stream: io.BytesIO, keys: dict[str, int]) -> list[Any]:
    """The operations of one pickle; addresses of storages are numbered, bytes are replaced by their number."""

    def normal(argument: Any) -> Any:
        if isinstance(argument, (bytes, bytearray)):
            return len(argument)
        if isinstance(argument, str) and "\x80" in argument:  # bytes, in protocol 2
            return len(argument)
        is_key = isinstance(argument, str) and len(argument) > 8 and argument.isdigit()
        return keys.setdefault(argument, len(keys)) if is_key else argument

    return [(op.name, normal(argument)) for op, argument, _ in pickletools.genops(stream) if op.name != "FRAME"]


def structure(path: Path) -> list[Any]:
    """The structure of a file: operations and globals of its pickles, names and sizes of its storages."""
    body = path.read_bytes()
    if path.suffix == ".safetensors":
        return [body[8 : 8 + int.from_bytes(body[:8], "little")], len(body)]
    if zipfile.is_zipfile(path):
        archive = zipfile.ZipFile(path)
        (name,) = (one for one in archive.namelist() if one.endswith("data.pkl"))
        return opcodes(io.BytesIO(archive.read(name)), {}) + [(one.filename, one.file_size) for one in archive.filelist]
    stream, found, keys = io.BytesIO(body), list[Any](), dict[str, int]()
    if path.suffix == ".pkl":
        return opcodes(stream, keys)
    for _ in range(4):  # number, version, system, object; keys of storages, by address, and their contents follow
        found += opcodes(stream, keys)
    return found


@pytest.mark.parametrize("moment", ["before", "step0", "step2", "in_step", "after"])
def test_files_are_those_of_python(folders: tuple[Path, Path], moment: str) -> None:
    plain, workers = (folder / moment for folder in folders)
    names = sorted(path.name for path in plain.iterdir())
    assert names == sorted(path.name for path in workers.iterdir())
    differing = [name for name in names if structure(plain / name) != structure(workers / name)]
    assert differing == []


def test_a_model_opens_with_weights_only(folders: tuple[Path, Path]) -> None:
    """Where its classes are allowed, as for a file of `python`."""
    import __main__
    from tests.cli import saved_files

    classes = [saved_files.Net, saved_files.Block]
    layers = [torch.nn.Sequential, torch.nn.Linear, torch.nn.LayerNorm]
    with pytest.MonkeyPatch.context() as patch, torch.serialization.safe_globals([*layers, *classes]):
        for cls in classes:
            patch.setattr(__main__, cls.__name__, cls, raising=False)
            patch.setattr(cls, "__module__", "__main__")
        for folder in folders:
            found = torch.load(folder / "after" / "model.pt", weights_only=True)
            assert not vars(vars(found)["_load_state_dict_post_hooks"])
