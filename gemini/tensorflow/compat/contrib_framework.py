"""tf.contrib.framework: variables, nested values, checkpoints and argument scopes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from gemini.tensorflow.compat.lazy_names import lazy_names

_TODAY = {
    "get_global_step": "train.get_global_step",
    "get_or_create_global_step": "train.get_or_create_global_step", "get_trainable_variables": "trainable_variables",
    "get_variables": "global_variables", "list_variables": "train.list_variables",
    "load_checkpoint": "train.load_checkpoint", "load_variable": "train.load_variable",
    "init_from_checkpoint": "train.init_from_checkpoint", "nest": "nest", "sort": "sort", "argsort": "argsort",
}  # fmt: skip

__getattr__ = lazy_names(
    "tf.contrib.framework",
    {name: f"tensorflow.compat.v1:{today}" for name, today in _TODAY.items()},
)

_Defaults = dict[Any, dict[str, Any]]
_scope: ContextVar[_Defaults | None] = ContextVar("argument_scope", default=None)


def add_arg_scope(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let `arg_scope` give default arguments to a function."""

    @functools.wraps(function)
    def scoped(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **{**(_scope.get() or {}).get(scoped, {}), **kwargs})

    return scoped


@contextmanager
def arg_scope(functions: Sequence[Callable[..., Any]] | _Defaults, **kwargs: Any) -> Iterator[_Defaults]:
    """Give default arguments to functions with `add_arg_scope`; a scope that was kept can be entered again."""
    if isinstance(functions, dict):
        inner = dict(functions)
    else:
        inner = dict(_scope.get() or {})
        for one in functions:
            inner[one] = {**inner.get(one, {}), **kwargs}
    token = _scope.set(inner)
    try:
        yield inner
    finally:
        _scope.reset(token)
