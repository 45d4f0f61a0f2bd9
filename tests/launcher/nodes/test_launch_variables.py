"""The processes of a launcher know their ranks and meet at one address, which the script does not see."""

from __future__ import annotations

import pytest

from gemini.errors import UsageError
from gemini.launcher.nodes.launch_variables import find_node_rank, without_launch_variables

LAUNCHERS = {
    "torchrun": [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "29500",
         "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True", "GROUP_RANK": str(rank)}
        for rank in range(2)
    ],
    "mpirun": [
        {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
         "PMIX_NAMESPACE": "prterun-1@1", "PMIX_RANK": str(rank)}
        for rank in range(2)
    ],
    "mpiexec": [
        {"PMI_RANK": str(rank), "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": str(rank),
         "PMI_ID": str(rank), "PMI_FD": str(5 + rank)}
        for rank in range(2)
    ],
    "srun": [
        {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
         "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1", "SLURM_STEP_NODELIST": "cn[003-004]", "SLURM_LOCALID": "0"}
        for rank in range(2)
    ],
    "horovodrun": [
        {"HOROVOD_RANK": str(rank), "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_LOCAL_RANK": str(rank),
         "HOROVOD_GLOO_RENDEZVOUS_PORT": "41234"}
        for rank in range(2)
    ],
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_processes_of_a_launcher_meet(launcher: str) -> None:
    found = [find_node_rank(environ) for environ in LAUNCHERS[launcher]]
    assert [one and (one.launcher, one.rank, one.count) for one in found] == [(launcher, 0, 2), (launcher, 1, 2)]
    assert len({one and (one.host, one.port) for one in found}) == 1
    hosts = {"torchrun": "node1", "srun": "cn003"}
    assert found[0] is not None
    assert found[0].host == hosts.get(launcher, "127.0.0.1")


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script_sees_none_of_the_variables(launcher: str) -> None:
    left = without_launch_variables(LAUNCHERS[launcher][1] | {"HOME": "/root"})
    assert find_node_rank(left) is None
    assert {"HOME"} <= set(left) <= {"HOME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NODELIST"}


def test_a_single_process_is_no_node() -> None:
    assert find_node_rank(LAUNCHERS["mpirun"][0] | {"OMPI_COMM_WORLD_SIZE": "1"}) is None


def test_several_hosts_need_the_address_of_the_first() -> None:
    spread = LAUNCHERS["mpirun"][0] | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    with pytest.raises(UsageError, match="MASTER_ADDR is not set"):
        find_node_rank(spread)
    found = find_node_rank(spread | {"MASTER_ADDR": "node1", "MASTER_PORT": "1234"})
    assert found is not None
    assert (found.host, found.port) == ("node1", 1234)
