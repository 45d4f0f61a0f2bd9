"""Start, show and end a small Ray cluster with a token, for workers on other hosts.

gemini cluster up                                on this host only (127.0.0.1:6380)
gemini cluster up --address 10.0.0.1             the first host; others of the network can join
gemini cluster up --join 10.0.0.1:6380           the other hosts, with a copy of the token
gemini cluster up --block …                      in the foreground, as job managers need it; Ctrl+C ends it
gemini cluster status 10.0.0.1:6380              the hosts of a cluster
gemini cluster down                              end what `up` has started on this host

The token is in ~/.ray/auth_token, or in the file that RAY_AUTH_TOKEN_PATH names; `up` makes one where there is none.
A process that has it can run any code on these hosts as you. Nothing is encrypted.
"""

from __future__ import annotations

import argparse

from gemini.errors import UsageError

SUMMARY = "start, show and end a Ray cluster for workers on other hosts"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini cluster`."""
    actions = parser.add_subparsers(dest="action", metavar="up | status | down", required=True)
    up = actions.add_parser("up", help="start Ray on this host")
    up.add_argument("--address", default="127.0.0.1", metavar="IP", help="this host's address (127.0.0.1)")
    up.add_argument("--port", type=int, default=6380, metavar="PORT", help="port of the first host (6380)")
    up.add_argument("--join", default="", metavar="HOST:PORT", help="join the cluster that was started there")
    up.add_argument("--cpus", type=int, default=0, metavar="N", help="workers on CPUs (default: one per core)")
    up.add_argument("--block", action="store_true", help="stay in the foreground, and end Ray with this process")
    status = actions.add_parser("status", help="show the hosts of a cluster")
    status.add_argument("cluster", metavar="HOST:PORT", help="address of the cluster")
    actions.add_parser("down", help="end what `up` has started on this host")


def run(args: argparse.Namespace) -> int:
    """Carry out an action."""
    from gemini.runtime.hosts import ray_start

    if args.action == "down":
        print(f"gemini cluster: ended {ray_start.end()} on this host")
    elif args.action == "status":
        from gemini.runtime.hosts.ray_cluster import RayCluster

        cluster = RayCluster(args.cluster)
        try:
            print(f"{args.cluster}: {len(cluster.hosts)} hosts")
            print("\n".join(f"  {host}" for host in cluster.hosts))
        finally:
            cluster.close()
    else:
        if args.cpus < 0 or not 0 < args.port < 1 << 16:
            raise UsageError(f"--cpus {args.cpus}, --port {args.port}: out of range\n    → leave them out")
        if args.block:
            ray_start.leave_on_signals()
        address = ray_start.start(args.address, args.port, args.join, args.cpus)
        print(f"gemini cluster: this host belongs to the cluster at {address}")
        if not args.join:
            print(f"    → on the others, with a copy of the token: gemini cluster up --join {address}")
            print(f"    → gemini_python --cluster {address} train.py", flush=True)
        if args.block:
            ray_start.wait()
    return 0
