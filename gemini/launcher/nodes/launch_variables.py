"""Launch variables: which of several processes this one is, by the environment of the program that started them."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from gemini.errors import UsageError

# By launcher: variables of rank and number of processes, of the number on this host, and those that name the job.
_LAUNCHERS = (
    ("torchrun", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", ("TORCHELASTIC_RUN_ID",)),
    ("horovodrun", "HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_SIZE", ("HOROVOD_GLOO_RENDEZVOUS_PORT",)),
    ("mpirun", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", ("PMIX_NAMESPACE",)),
    ("mpiexec", "PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", ()),  # nothing that is equal on all hosts
    ("srun", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE", ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)
_PREFIXES = ("TORCHELASTIC_", "OMPI_", "PMI_", "PMIX_", "HOROVOD_", "MPI_LOCAL", "ROLE_", "GROUP_", "LOCAL_WORLD")
_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "SLURM_PROCID", "SLURM_NTASKS",
          "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE")  # fmt: skip
_FIRST_NODE = re.compile(r"([^,\[]+)(?:\[(\d+))?")


@dataclass(frozen=True)
class NodeRank:
    """One of the processes of a launcher, and where they meet."""

    launcher: str
    rank: int
    count: int
    host: str  # of rank 0
    port: int
    is_served: bool  # whether the launcher serves the store there


def find_node_rank(environ: Mapping[str, str] = os.environ) -> NodeRank | None:
    """Return which process this is; None where there is one only. Raise UsageError where they cannot meet."""
    for launcher, rank, count, local, job in _LAUNCHERS:
        if environ.get(rank, "").isdigit() and environ.get(count, "").isdigit() and int(environ[count]) > 1:
            host, port = environ.get("MASTER_ADDR", ""), environ.get("MASTER_PORT", "")
            if not host:
                host = _first_host(launcher, environ, is_single=environ.get(local, "").split("(")[0] == environ[count])
            name = ".".join([launcher, *(environ.get(one, "") for one in job)])
            number = int(port) if port.isdigit() else 20_000 + zlib.crc32(name.encode()) % 20_000
            served = environ.get("TORCHELASTIC_USE_AGENT_STORE", "") == "True"
            return NodeRank(launcher, int(environ[rank]), int(environ[count]), host, number, served)
    return None


def _first_host(launcher: str, environ: Mapping[str, str], *, is_single: bool) -> str:
    if is_single:
        return "127.0.0.1"
    found = _FIRST_NODE.match(environ.get("SLURM_STEP_NODELIST", ""))
    if launcher == "srun" and found is not None:
        return found[1] + (found[2] or "")
    raise UsageError(
        f"{launcher} has started processes on several hosts, and MASTER_ADDR is not set\n"
        f"    → pass the host of rank 0 to all of them: {launcher} -x MASTER_ADDR=node1, or export it"
    )


def without_launch_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which libraries see a single process."""
    return {name: value for name, value in environ.items() if name not in _NAMES and not name.startswith(_PREFIXES)}
