"""Workers on other hosts against one host and bare gloo, in one run; hosts are network namespaces (root, Linux).

    python benchmarks/bench_hosts.py [--rate 10gbit] [--rounds 8] [--skip-nodes]

call        a request to a worker on the other host and its reply
16 MB       one way, relative to torch.distributed (gloo) alone between the same hosts
ready       from `gemini.compile` to the first reply of a worker on the other host, with the code of the script
gpt         33.7 M parameters, 8 micro-batches, two workers, the same schedule: on one host, and on two over a link of
            that rate; a step is forward, backward and optimizer. Predicted: before any step, by the measured link
nodes       the same model by one process, and by torchrun on two nodes, also with replicated optimizers: samples per
            second, efficiency

Limits: call 1.5 ms, 16 MB 1.2, ready 10 s, gpt 1.25 and predicted within 15 %.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

_HERE = Path(__file__).parent
sys.path.insert(0, str(_HERE.parent))

from conformance.hosts.host_namespaces import HostNamespaces, is_supported  # noqa: E402

_PROGRAM = str(_HERE / "hosts_program.py")


def main() -> int:
    """Print the table; return 1 where a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="10gbit")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--skip-nodes", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not is_supported():
        print("bench_hosts: skipped: it needs root and iproute2")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts end in any case
    with tempfile.TemporaryDirectory() as folder:
        hosts = HostNamespaces(2, Path(folder))
        try:
            found = _measure(hosts, args)
        finally:
            hosts.close()
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return _report(found)


def _measure(hosts: HostNamespaces, args: argparse.Namespace) -> dict[str, Any]:
    hosts.shape(2, args.rate)
    place = hosts.start_cluster()
    found = _read(
        hosts.run(1, sys.executable, _PROGRAM, "cluster", place, hosts.address(2), str(args.rounds), timeout=250)
    )
    found["gloo_ms"] = _measure_gloo(hosts)
    if not args.skip_nodes:
        for count in (1, 2):
            found[f"nodes{count}"] = _measure_nodes(hosts, count)
        found["replicated"] = _measure_nodes(hosts, 2, "--data-parallel", "replicated")
    return found


def _measure_gloo(hosts: HostNamespaces) -> float:
    other = hosts.start(2, sys.executable, _PROGRAM, "gloo", "1", hosts.address(1), hosts.address(2))
    try:
        found = hosts.run(1, sys.executable, _PROGRAM, "gloo", "0", hosts.address(1), hosts.address(1))
        other.wait(30)
    finally:
        other.kill()
    return float(_read(found)["ms"])


def _measure_nodes(hosts: HostNamespaces, count: int, *flags: str) -> dict[str, Any]:
    bin_ = Path(sys.executable).parent

    def words(rank: int) -> list[str]:
        return [
            str(bin_ / "torchrun"), "--nnodes", str(count), "--nproc-per-node", "1", "--node-rank", str(rank),
            "--master-addr", hosts.address(1), "--master-port", "29571", "--no-python", str(bin_ / "gemini_python"),
            "--quiet", *flags, _PROGRAM, "nodes",
        ]  # fmt: skip

    others = [hosts.start(rank + 1, *words(rank)) for rank in range(1, count)]
    try:
        plain = [sys.executable, _PROGRAM, "nodes"]
        return _read(hosts.run(1, *(words(0) if count > 1 else plain), timeout=200))
    finally:
        for one in others:
            one.kill()


def _read(found: Any) -> dict[str, Any]:
    if found.returncode or not found.stdout.strip():
        raise SystemExit(f"{' '.join(found.args)}\n{found.stdout}\n{found.stderr}")
    result: dict[str, Any] = json.loads(found.stdout.strip().splitlines()[-1])
    return result


def _report(found: dict[str, Any]) -> int:
    one, two = (statistics.median(found[name]) for name in ("one_host_ms", "two_hosts_ms"))
    large, gloo = found["large_ms"], found["gloo_ms"]
    rows = [
        ("call", f"{found['call_ms']:.2f} ms", found["call_ms"], 1.5),
        ("16 MB", f"{large:.1f} ms, gloo {gloo:.1f} ms", large / gloo, 1.2),
        ("ready", f"{found['ready_s']:.1f} s", found["ready_s"], 10.0),
        ("gpt", f"{two:.0f} ms on two hosts, {one:.0f} on one ({found['schedule']})", two / one, 1.25),
        ("predicted", f"{found['predicted_ms']:.0f} ms, measured {found['step_ms']:.0f}",
         abs(found["predicted_ms"] / found["step_ms"] - 1), 0.15),
        ("equal", f"largest difference {found['difference']:.1e}", found["difference"], 1e-4),
    ]  # fmt: skip
    for name, text, value, limit in rows:
        print(f"{name:10} {text:55} {value:8.3g}  limit {limit:g}  {'' if value <= limit else 'MISSED'}")
    if "nodes2" in found:
        one = found["nodes1"]["samples_per_s"]
        print(f"nodes      {one:.1f} samples per second on one")
        for name, text in (("nodes2", "on two"), ("replicated", "on two, replicated optimizers")):
            rate = found[name]["samples_per_s"]
            print(f"nodes      {rate:.1f} {text}: efficiency {rate / one / 2:.2f}")
    return int(any(value > limit for _, _, value, limit in rows))


if __name__ == "__main__":
    began = time.time()
    code = main()
    print(f"{time.time() - began:.0f} s")
    sys.exit(code)
