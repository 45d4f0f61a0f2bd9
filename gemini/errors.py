"""Every exception Gemini raises on purpose.

    GeminiError
    ├── ConfigError          a setting is wrong, unknown or contradicts another
    ├── UsageError           a command line cannot be understood
    ├── MissingEngineError   an optional dependency is not installed (names the extra)
    ├── TorchVersionError    the installed torch is outside the tested range
    ├── InstrumentError      instrumenting source failed
    │   ├── PassError        a pass is unknown, cyclic, or produced something invalid
    │   │   └── EditError    an edit cannot be made, or two edits overlap
    │   └── PatternError     a declarative pattern cannot be read
    ├── ArtifactError        an artifact file cannot be read, is stale or cannot be written
    ├── CaptureError         a model cannot be captured as requested, or a captured graph cannot be used
    ├── ProfileError         a graph cannot be profiled as requested, or a profile cannot be read
    ├── PartitionError       a graph cannot be cut as requested, or a partition does not fit
    ├── ShardingError        a graph cannot be sharded as requested, or a shard plan does not fit
    ├── GenerateError        stages cannot be generated, or generated ones cannot be used
    ├── WorkerError          a worker died, hung or could not be started
    ├── GraphError           a graph of TensorFlow cannot be run as requested, or was changed after its first run
    └── ScheduleError        a schedule cannot be made, read or trusted
        ├── PlacementError   the blocks are not a valid placement
        ├── InfeasibleError  no schedule exists under these limits
        └── InvalidPlanError a plan breaks a rule; carries the marked grid

The text of an error names the fault with its values and, after a line break, the remedy. `Fault`s are collected and
raised together, so that one run shows all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DISTRIBUTION = "gemini-instrumenter"  # the name of the package on PyPI


@dataclass(frozen=True)
class Fault:
    """One fault and its remedy."""

    what: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.what}\n    → {self.remedy}" if self.remedy else self.what


class GeminiError(Exception):
    """The root of all errors that Gemini raises on purpose."""


class ConfigError(GeminiError):
    """A setting is wrong, unknown or contradicts another; lists every fault found."""

    def __init__(self, faults: Sequence[Fault], source: str = "") -> None:
        self.faults = tuple(faults)
        count = f"{len(faults)} faults" if len(faults) != 1 else "1 fault"
        title = f"{source}: {count}" if source else f"configuration: {count}"
        super().__init__("\n".join([title, *(f"  - {fault}" for fault in faults)]))


class UsageError(GeminiError):
    """A command line cannot be understood; lists every option at fault."""


class MissingEngineError(GeminiError):
    """An optional dependency is needed and not installed."""

    def __init__(self, engine: str, extra: str, purpose: str) -> None:
        super().__init__(
            f"{purpose} needs {engine}, which is not installed\n    → pip install '{DISTRIBUTION}[{extra}]'"
        )


class TorchVersionError(GeminiError):
    """The installed torch is outside the tested range."""


class InstrumentError(GeminiError):
    """Instrumenting source failed."""


class PassError(InstrumentError):
    """A pass is unknown, part of a cycle, or produced something invalid."""


class EditError(PassError):
    """An edit cannot be made, or two edits overlap; carries the `ast` position, if there is one."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class PatternError(InstrumentError):
    """A declarative pattern cannot be read."""


class ArtifactError(GeminiError):
    """An artifact file cannot be read, is stale, or cannot be written."""


class CaptureError(GeminiError):
    """A model cannot be captured as requested, or a captured graph cannot be used."""


class ProfileError(GeminiError):
    """A graph cannot be profiled as requested, or a profile cannot be read."""


class PartitionError(GeminiError):
    """A graph cannot be cut as requested, or a partition does not fit its graph; names a possible alternative."""


class ShardingError(GeminiError):
    """A graph cannot be sharded as requested, a shard plan does not fit its graph, or a rule is refuted."""


class GenerateError(GeminiError):
    """Stages cannot be generated, or generated ones cannot be used."""


class WorkerError(GeminiError):
    """A worker died, hung or could not be started; names it and its last action."""


class GraphError(GeminiError):
    """A graph of TensorFlow cannot be run as requested, or was changed after its first run."""


class ScheduleError(GeminiError):
    """A schedule cannot be made, read or trusted."""


class PlacementError(ScheduleError):
    """The blocks are not a valid placement (cycles, negative spans, devices out of range)."""


class InfeasibleError(ScheduleError):
    """No schedule exists under the given limits; names the smallest feasible limit."""


class InvalidPlanError(ScheduleError):
    """A plan breaks a rule (dependency, exclusivity, memory, completeness)."""
