"""Serve workers on this host for a program on another host.

(umask 077; head -c 32 /dev/urandom | base64 > secret)           once; the same file on both hosts
gemini worker --secret-file secret                               listens at 127.0.0.1:9000, for programs on this host
gemini worker --secret-file secret --listen 10.0.0.2:9000        for other hosts of a trusted network

The program names it in its device mapping, as "10.0.0.2:9000/cpu", and finds the secret by GEMINI_SECRET_FILE.
Anyone with the secret can run any code on this host as your user.
"""

from __future__ import annotations

import argparse
import sys

from gemini.errors import UsageError

SUMMARY = "serve workers on this host for a program on another host"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `gemini worker`."""
    parser.add_argument(
        "--listen",
        default="127.0.0.1:9000",
        metavar="HOST:PORT",
        help="address to listen at (127.0.0.1:9000); port 0: any",
    )
    parser.add_argument(
        "--secret-file", default="", metavar="FILE", help="file of the secret (default: GEMINI_SECRET_FILE)"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="N", help="threads per worker (all cores)")
    parser.add_argument("--keep", action="store_true", help="serve one controller after another, until interrupted")


def run(args: argparse.Namespace) -> int:
    """Listen and serve."""
    import os

    from gemini.config.host_address import place_at
    from gemini.runtime.hosts import shared_secret

    address = place_at(args.listen)
    if address is None:
        raise UsageError(f"--listen {args.listen}: not an address\n    → write HOST:PORT, as in 127.0.0.1:9000")
    if args.threads < 0:
        raise UsageError(f"--threads {args.threads}: must be 1 or more\n    → omit it to use all cores")
    if sys.platform != "linux":
        raise UsageError(f"workers need Linux, this is {sys.platform}")
    known = shared_secret.read_secret(args.secret_file)
    from gemini.runtime.hosts.listener import Listener

    threads = args.threads or len(os.sched_getaffinity(0))
    listener = Listener(address, known, threads, args.keep, _print_line)
    _print_line(f"listening at {listener.address.place}")
    listener.serve()
    return 0


def _print_line(text: str) -> None:
    print(f"gemini worker: {text}", file=sys.stderr, flush=True)
