"""Shared secret: the contents of a file that a controller and the workers on other hosts share."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from gemini.errors import ConfigError, Fault

ENVIRONMENT = "GEMINI_SECRET_FILE"
_LEAST = 16  # bytes
_MAKE = "make one: (umask 077; head -c 32 /dev/urandom | base64 > FILE), and copy it to every host"


def read_secret(path: str = "") -> bytes:
    """Return the secret in a file: the named one, or the one that the environment names."""
    name = path or os.environ.get(ENVIRONMENT, "")
    if not name:
        raise ConfigError([Fault("no secret is given for workers on other hosts", f"set {ENVIRONMENT}; {_MAKE}")])
    try:
        with Path(name).open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            found = file.read().strip()
    except OSError as error:
        raise ConfigError([Fault(f"the secret in {name} cannot be read: {error.strerror}", _MAKE)]) from None
    faults = []
    if stat.S_ISREG(mode) and mode & 0o077:
        faults.append(Fault(f"other users can read the secret in {name} (mode {mode & 0o777:o})", f"chmod 600 {name}"))
    if len(found) < _LEAST:
        faults.append(Fault(f"the secret in {name} has {len(found)} bytes, at least {_LEAST} are required", _MAKE))
    if faults:
        raise ConfigError(faults)
    return found
