"""Pass registry: the built-in passes, and those of installed packages.

A package adds passes through entry points of the group ``gemini.passes``; each names a `Pass` class, a `Pass` object
(such as a `Rewrite`) or a function that returns one:

    [project.entry-points."gemini.passes"]
    mylib-linear = "mylib.gemini:linear_pass"

Passes are imported on demand, and an entry point that cannot be loaded costs one line, not the run.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from gemini.entry_points import entry_points
from gemini.errors import Fault, PassError
from gemini.instrument.passes.base import Pass
from gemini.nearest_name import remedy

GROUP = "gemini.passes"

BUILT_IN: dict[str, str] = {
    "training-sites": "gemini.instrument.passes.training_sites:TrainingSites",
    "managed-objects": "gemini.instrument.passes.managed_objects:ManagedObjects",
    "tensor-types": "gemini.instrument.passes.tensor_types:TensorTypes",
    "device-placement": "gemini.instrument.passes.device_placement:DevicePlacement",
    "tensorflow-imports": "gemini.instrument.passes.tensorflow_imports:TensorflowImports",
}
"""Built-in passes, in the order they run where none needs another: name → ``module:object``."""


@dataclass(frozen=True)
class Registered:
    """A registered pass; `origin` names its distribution, `load` imports it."""

    name: str
    origin: str
    target: str

    def load(self) -> Pass:
        """Import the pass; raise `PassError` where it cannot be loaded."""
        module, _, attribute = self.target.partition(":")
        try:
            found: object = importlib.import_module(module)
            for part in filter(None, attribute.split(".")):
                found = getattr(found, part)
            made = found if isinstance(found, Pass) else found() if callable(found) else found
        except (Exception, SystemExit) as error:
            raise PassError(
                f"pass {self.name!r} from {self.origin} cannot be loaded from {self.target}: "
                f"{type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, Pass):
            raise PassError(
                f"pass {self.name!r} from {self.origin}: {self.target} returns {type(made).__name__}, not a Pass"
            )
        made.name = self.name  # registered, selected and reported under one name
        return made


def available() -> tuple[Registered, ...]:
    """Return every registered pass, the built-in ones first; of two passes of one name the first counts."""
    found = {name: Registered(name, "built-in", target) for name, target in BUILT_IN.items()}
    for entry in entry_points(GROUP):
        origin = f"{entry.dist.name} {entry.dist.version}" if entry.dist else "unknown distribution"
        found.setdefault(entry.name, Registered(entry.name, origin, entry.value))
    return tuple(found.values())


def select(
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    *,
    notice: Callable[[str], None] | None = None,
    registered: Iterable[Registered] | None = None,
) -> list[Pass]:
    """Return the passes to run: all, or `only` these and their needs, without `skip`.

    Raises `PassError` for an unknown name, for a pass of `only` that cannot be loaded, and for one that needs a skipped
    pass. Any other pass that cannot be loaded is dropped with one line of notice.
    """
    known = {one.name: one for one in (available() if registered is None else registered)}
    faults = [
        Fault(f"unknown pass {name!r}", remedy(name, known) if known else "no passes are registered")
        for name in dict.fromkeys((*only, *skip))
        if name not in known
    ]
    if faults:
        raise PassError("\n".join(str(fault) for fault in faults))
    loaded = _load(known, only, skip, notice)
    unmet = [
        Fault(f"pass {one.name!r} needs {need!r}, which is skipped", f"skip it too: --skip-pass {one.name}")
        for one in loaded.values()
        for need in one.needs
        if need in skip
    ]
    if unmet:
        raise PassError("\n".join(str(fault) for fault in unmet))
    return [loaded[name] for name in known if name in loaded]


def _load(
    known: dict[str, Registered], only: Sequence[str], skip: Sequence[str], notice: Callable[[str], None] | None
) -> dict[str, Pass]:
    wanted = [name for name in (only or known) if name not in skip]
    loaded: dict[str, Pass] = {}
    while wanted:
        name = wanted.pop(0)
        if name in loaded:
            continue
        try:
            loaded[name] = known[name].load()
        except PassError as error:
            if name in only:
                raise
            if notice is not None:
                notice(f"{error}; the pass is dropped")
            continue
        wanted.extend(need for need in loaded[name].needs if need in known and need not in skip)
    return loaded
