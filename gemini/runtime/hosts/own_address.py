"""Own address: the address by which other hosts reach this one."""

from __future__ import annotations

import socket

from gemini.errors import ConfigError, Fault


def address_towards(address: str) -> str:
    """Return the address of this host on the way to another one, given as HOST or HOST:PORT."""
    host = address.rpartition(":")[0] or address
    try:
        family, kind, _, _, place = socket.getaddrinfo(host.strip("[]"), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(place)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise ConfigError(
            [Fault(f"the host of {address} cannot be reached: {error}", "write HOST:PORT of the cluster's head")]
        ) from None
