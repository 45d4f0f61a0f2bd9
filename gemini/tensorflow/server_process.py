"""Server process: one `tf.train.Server`, started by the process of the script and ended with it.

The socket to that process carries one order, `{"cluster": …, "task": …}`, and the answer: `ready`, or the reason for
none. When it closes, this process ends. What TensorFlow prints while it starts goes to the answer, not to the terminal.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from typing import Any, NoReturn

from gemini.runtime.worker.worker_process import bind_to_parent
from gemini.tensorflow.loopback import confine

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
