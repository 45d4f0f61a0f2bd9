"""Scripts on a real Ray cluster of two hosts (network namespaces) print what one process prints, whatever fails."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.hosts.fault_sweep import Sweep
from conformance.hosts.host_namespaces import is_supported

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not is_supported(), reason="network namespaces need root")]
_BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sweep]:
    made = Sweep(tmp_path_factory.mktemp("hosts"))
    yield made
    made.close()


@pytest.mark.parametrize("fault", ["none", "kill worker", "cut", "controller"])
def test_a_run_ends_as_promised(fault: str, sweep: Sweep) -> None:
    assert sweep.run(fault, 99 if fault == "none" else 9).startswith("ok")


def test_shards_of_a_stage_on_another_host(sweep: Sweep) -> None:
    there = f"{sweep.hosts.address(2)}/cpu"
    mapping = f'{{"stage_0": {{"shard_0": "{there}", "shard_1": "{there}"}}}}'
    assert sweep.run("none", 99, "--mode", "sharding", mapping=mapping).startswith("ok")


def test_two_nodes_print_once_what_one_process_prints(sweep: Sweep) -> None:
    def words(rank: int) -> list[str]:
        place = ["--master-addr", sweep.hosts.address(1), "--master-port", "29533", "--node-rank", str(rank)]
        nodes = ["--nnodes", "2", "--nproc-per-node", "1", *place]
        return [str(_BIN / "torchrun"), *nodes, str(_BIN / "gemini_python"), "train.py"]

    other = sweep.hosts.start(2, *words(1))
    try:
        found = sweep.hosts.run(1, *words(0), timeout=200)
        assert other.wait(30) == found.returncode == 0
    finally:
        other.kill()
    assert sweep.read_losses(found.stdout) == pytest.approx(sweep.expected, abs=2e-3)


@pytest.mark.parametrize(
    ("token", "mapping", "text"),
    [
        ("0" * 64, '{"stage_0": {"shard_0": "cpu"}, "stage_1": {"shard_0": "any/cpu"}}', "refused the token"),
        ("", '{"stage_0": {"shard_0": "cpu"}, "stage_1": {"shard_0": "node77/cpu"}}', "no host node77 in the cluster"),
        ("", '{"stage_0": {"shard_0": "cpu"}, "stage_1": {"shard_0": "any/cuda"}}', "computes on cuda, the model is"),
    ],
    ids=["a wrong token", "an unknown host", "a missing GPU"],
)
def test_bad_input_is_one_error_and_starts_nothing(token: str, mapping: str, text: str, sweep: Sweep) -> None:
    command = [str(_BIN / "gemini_python"), "--cluster", sweep.place, "--device-mapping", mapping, "train.py"]
    found = sweep.hosts.run(1, *command, env={"RAY_AUTH_TOKEN": token} if token else {})
    assert (found.returncode, found.stdout) == (2, "")
    assert text in found.stderr
    assert found.stderr.count("fault") == 1
    assert sweep.await_nothing_left(3.0) == []
