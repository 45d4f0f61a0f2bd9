"""Call outcome: the path that a call of a managed model takes, and why it takes no faster one.

    Deferred(output)     the call waits for its loss; call, loss and backward then run pipelined in the workers
    Completed(output)    a call without gradients that has run pipelined
    Eager(reason)        eager dispatch: the forward runs in this process, its remote modules run in the workers
    Local(reason)        the call runs in this process

`CallPath` counts steps by the path they took; `FallbackReason` lists the fixed reasons for a slower path. Reasons that
name an op, a value or an error are plain strings: `describe_failure`, `describe_planning_error`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

_LONGEST = 300


class _Text(str, Enum):
    """An enumeration whose members are their text."""

    def __str__(self) -> str:
        return str(self.value)

    def __format__(self, format_spec: str) -> str:
        return format(str(self.value), format_spec)


class CallPath(_Text):
    """The paths of a call, the fastest first; values are those of the journal's files."""

    OVERLAPPED = "overlapped"
    SINGLE_MICROBATCH = "undivided"
    EAGER = "dispatched"
    LOCAL = "local"

    @property
    def label(self) -> str:
        """The name that users see."""
        return {"undivided": "single micro-batch", "dispatched": "eager dispatch"}.get(self.value, self.value)


class FallbackReason(_Text):
    """Why a call takes a slower path than the pipelined one."""

    FIRST_CALL = "the first call shows which modules the model calls"
    FIRST_OF_SIZE = "the first call of its size shows what is returned"
    UNPAID = "calls of its kind are too few so far to repay a plan of their own"
    OTHER_SIZES = "its inputs have other sizes than those it was planned for"
    READ_EARLY = "an output was read, or passed to another model, before there was a loss"
    DRAWN_EARLY = "random numbers were drawn, or their generator was read, between the call and its loss"
    WRITTEN_EARLY = "a parameter or a buffer was written between the call and its loss"
    BUFFERS_READ = "a buffer that it writes was read between the call and its loss"
    LATER_CALL = "another call that must run after it was made before there was a loss"
    UNUSUAL_BACKWARD = "its backward starts from several values or from no scalar, or builds a graph"
    UNPLANNED_BRANCH = "a branch on random numbers goes a way for which there is no plan"
    ONE_SAMPLE_STATISTICS = "micro-batches of one sample have no statistics"
    SWAPPED_PARAMETERS = "it is called with other parameters than its own"
    CHECKPOINTED = "an activation checkpoint of the script runs it again in backward"
    SAVED_TENSOR_HOOKS = "saved-tensor hooks of the script take the tensors that it saves for backward"
    CHANGING_ARGUMENTS = "its plain arguments differ in every call"
    RETURNS_OTHER_TENSORS = "it returns other tensors than its graph"


@dataclass(frozen=True)
class Deferred:
    """The call waits for its loss; `output` holds deferred tensors."""

    output: Any


@dataclass(frozen=True)
class Completed:
    """The call has run pipelined."""

    output: Any


@dataclass(frozen=True)
class Eager:
    """The call runs by eager dispatch, with these arguments."""

    reason: str
    args: Any = ()
    kwargs: Any = field(default_factory=dict)


@dataclass(frozen=True)
class Local:
    """The call runs in this process, with these arguments."""

    reason: str
    args: Any = ()
    kwargs: Any = field(default_factory=dict)


Outcome = Deferred | Completed | Eager | Local


def describe_planning_error(error: Exception) -> str:
    """Return why there is no plan: all faults that the error lists, without the remedies."""
    text = str(error).partition("\n    →")[0]
    return " ".join(text.split())[:_LONGEST] or type(error).__name__


def describe_failure(error: Exception) -> str:
    """Return what failed: the class of the error and its first line."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:_LONGEST]
