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
    ├── ArtifactError        a file of ours cannot be read, is stale or cannot be written
    ├── CaptureError         a model cannot be captured as asked, or a captured graph cannot be used
    ├── ProfileError         a graph cannot be profiled as asked, or a profile cannot be read
    ├── PartitionError       a graph cannot be cut as asked, or a partition does not fit
    ├── GenerateError        stages cannot be generated, or generated ones cannot be used
    ├── WorkerError          a worker died, hung or could not be started
    └── ScheduleError        a schedule cannot be made, read or trusted
        ├── PlacementError   the blocks given are not a valid placement
        ├── InfeasibleError  no schedule exists under these limits
        └── InvalidPlanError a plan breaks a rule; carries the marked grid

An error's text says what is wrong with its values and, after a line break, what to do next. `Fault`s are
collected first and raised together, so that one run shows all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DISTRIBUTION = "gemini-instrumenter"  # what pip calls the package `gemini`


@dataclass(frozen=True)
class Fault:
    """One thing that is wrong, and how to put it right."""

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
    """An edit cannot be made, or two edits overlap; knows the `ast` position where, if there is one."""

    def __init__(self, message: str, line: int = 0, column: int = 0) -> None:
        super().__init__(message)
        self.line = line
        self.column = column


class PatternError(InstrumentError):
    """A declarative pattern cannot be read."""


class ArtifactError(GeminiError):
    """A file of ours cannot be read, is stale, or cannot be written."""


class CaptureError(GeminiError):
    """A model cannot be captured as asked, or a captured graph cannot be used."""


class ProfileError(GeminiError):
    """A graph cannot be profiled as asked, or a profile cannot be read."""


class PartitionError(GeminiError):
    """A graph cannot be cut as asked, or a partition does not fit its graph; says what would be possible."""


class GenerateError(GeminiError):
    """Stages cannot be generated, or generated ones cannot be used."""


class WorkerError(GeminiError):
    """A worker died, hung or could not be started; names it, and what it did last."""


class ScheduleError(GeminiError):
    """A schedule cannot be made, read or trusted."""


class PlacementError(ScheduleError):
    """The blocks given are not a valid placement (cycles, negative spans, devices out of range)."""


class InfeasibleError(ScheduleError):
    """No schedule exists under the given limits; says the smallest that would do."""


class InvalidPlanError(ScheduleError):
    """A plan breaks a rule (dependency, exclusivity, memory, completeness)."""
