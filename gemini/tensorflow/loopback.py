"""Loopback: keeps a TensorFlow server off the network.

TensorFlow's servers listen on every interface, and run any graph that they receive. Binding their listening socket to
the loopback interface makes the kernel refuse everything that comes from another machine.
"""

from __future__ import annotations

import os
import socket
from contextlib import closing, suppress

from gemini.log import log_line

_INTERFACE = b"lo\0"


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
