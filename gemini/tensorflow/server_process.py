"""Server process: one `tf.train.Server`, started by the process of the script and ended with it.

The socket to that process carries one order, `{"cluster": …, "task": …}`, and the answer: `ready`, or the reason for
none. When it closes, this process ends. What TensorFlow prints while it starts goes to the answer, not to the terminal.

TensorFlow's servers listen on every interface, and run any graph that they receive. Binding their listening socket to
the loopback interface makes the kernel refuse everything that comes from another machine.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from contextlib import closing, suppress
from typing import Any, NoReturn

from gemini.log import log_line
from gemini.runtime.worker.worker_process import bind_to_parent

_INTERFACE = b"lo\0"
_TAIL = 2000  # characters of an error


def main() -> NoReturn:
    """Serve until the process of the script ends."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    bind_to_parent(int(sys.argv[2]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the script
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    with connection.makefile("rw", encoding="utf-8") as stream:
        order = json.loads(stream.readline())
        server, reason = _start(order)
        stream.write(json.dumps({"reason": reason}) + "\n")
        stream.flush()
        if server is not None:
            stream.readline()  # blocks until the other end closes
    os._exit(0)  # TensorFlow's servers have no end


def _start(order: dict[str, Any]) -> tuple[Any, str]:
    """Return the server, or the reason for none; standard error is kept from the terminal meanwhile."""
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as noise:
        os.dup2(noise.fileno(), 2)
        try:
            server, reason = make_server(order), ""
        except Exception as error:
            noise.seek(0)
            text = noise.read().decode(errors="replace")
            server, reason = None, f"{type(error).__name__}: {error}\n{text[-_TAIL:]}"
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
    return server, reason


def make_server(order: dict[str, Any]) -> Any:
    """Start the server of an order in this process, confined to the loopback interface."""
    import tensorflow.compat.v1 as tf

    threads = order["threads"]
    settings = tf.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=threads, device_count={"CPU": order["cpus"]}
    )
    job, task = order["job"], order["task"]
    server = tf.train.Server(order["cluster"], job_name=job, task_index=task, config=settings)
    confine(int(order["cluster"][job][task].rpartition(":")[2]))
    return server


# ── the loopback interface ───────────────────────────────────────────────────────────────────────────────────────────
def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that no process listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def confine(port: int, *, quiet: bool = False) -> bool:
    """Bind this process's listening socket at `port` to the loopback interface; one line where the system refuses."""
    done = False
    with suppress(OSError, AttributeError):
        for listener in listening_sockets(port):
            with closing(listener):
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, _INTERFACE)
                done = True
    if not done and not quiet:
        log_line(f"gemini: port {port} of a TensorFlow server is open to the network: this system cannot confine it")
    return done


def listening_sockets(port: int) -> list[socket.socket]:
    """Return duplicates of this process's sockets that listen at `port`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            one = socket.socket(fileno=os.dup(int(name)))
            if one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and one.getsockname()[1:2] == (port,):
                found.append(one)
            else:
                one.close()
    return found
