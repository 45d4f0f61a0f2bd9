"""Node launch: one process per node, of which rank 0 runs the script.

    rank 0     gemini_python, which serves the meeting point, and the script as its child
    rank 1 …   agents: each starts the workers of its node, and ends with the script, with its exit code

The script sees none of the launcher's variables: libraries that would start one copy per rank do not. A script that is
distributed by itself is left alone, on every rank.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from gemini.launcher.nodes.launch_variables import NodeRank, without_launch_variables

if TYPE_CHECKING:
    from gemini.launcher.process.program_file import Request

_DISTRIBUTED = re.compile(
    r"\b(init_process_group|DistributedDataParallel|FullyShardedDataParallel|fully_shard|init_device_mesh"
    r"|hvd\.init|horovod\.torch|deepspeed|DistributedSampler|MirroredStrategy|MultiWorkerMirroredStrategy)\b"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def find_distributed_call(request: Request) -> str:
    """Return what makes a program distributed by itself, as its source shows; '' if nothing does."""
    from gemini.instrument.program.code_tree import CodeTree

    if any(name.startswith("ACCELERATE_") for name in os.environ):
        return "is launched by accelerate"
    try:
        tree = CodeTree.of_script(request.target) if request.kind == "script" else CodeTree.of_module(request.target)
    except (OSError, ImportError, SyntaxError, ValueError):
        return ""
    for node in tree.nodes.values():
        found = None if node.source is None else _DISTRIBUTED.search(_without_comments(node.source.text))
        if found is not None:
            return f"uses {found[0]} ({os.path.basename(node.path or node.module)})"
    return ""


def _without_comments(text: str) -> str:
    return "\n".join(line.partition("#")[0] for line in text.splitlines())


def run_script(node: NodeRank) -> int:
    """Run this command again as the script's process of rank 0, with the other nodes at its disposal."""
    from gemini.runtime.hosts.node_agent import NODES, end_agents, serve_meeting

    nodes = {"host": node.host, "port": node.port, "count": node.count, "parent": os.getpid()}
    environment = without_launch_variables(os.environ) | {NODES: json.dumps(nodes)}
    script = subprocess.Popen([sys.executable, *sys.orig_argv[1:]], env=environment)

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        script.send_signal(number)

    for number in _SIGNALS:
        signal.signal(number, forward)
    try:
        store = serve_meeting(node.host, node.port, is_served=node.is_served)
    except BaseException:
        script.kill()
        raise
    code = script.wait()
    end_agents(store, node.count, code)
    return code if code >= 0 else 128 - code


def run_agent(node: NodeRank) -> NoReturn:
    """Serve the script of rank 0 until it ends; exit with its code."""
    from gemini.runtime.hosts.node_agent import NodeAgent

    NodeAgent(node.host, node.port, node.rank).serve()
