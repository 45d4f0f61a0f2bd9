"""tf.contrib.training: hyper-parameters as an object."""

from __future__ import annotations

import json
from typing import Any

_TRUE, _FALSE = {"true", "t", "1"}, {"false", "f", "0"}


class HParams:
    """Named values; `parse` reads `name=value,list=[1,2]` and keeps the type of each."""

    def __init__(self, **values: Any) -> None:
        self.__dict__["_values"] = {}
        for name, value in values.items():
            self.add_hparam(name, value)

    def add_hparam(self, name: str, value: Any) -> None:
        """Add a value; raise ValueError where the name exists."""
        if name in self._values or hasattr(type(self), name):
            raise ValueError(f"hyper-parameter name is reserved: {name}")
        self._values[name] = list(value) if isinstance(value, tuple) else value

    def set_hparam(self, name: str, value: Any) -> None:
        """Replace a value by one of the same type."""
        old = self._values[name]
        if isinstance(old, list) != isinstance(value, list):
            raise ValueError(f"hyper-parameter {name!r} is {old!r}, which {value!r} cannot replace")
        self._values[name] = _of_type(old, value, name)

    def del_hparam(self, name: str) -> None:
        """Remove a value."""
        self._values.pop(name, None)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value, or the default."""
        return self._values.get(key, default)

    def values(self) -> dict[str, Any]:
        """Return all values."""
        return dict(self._values)

    def override_from_dict(self, values: dict[str, Any]) -> HParams:
        """Replace the values of a dict."""
        for name, value in values.items():
            self.set_hparam(name, value)
        return self

    def parse_json(self, text: str) -> HParams:
        """Replace the values of a JSON object."""
        return self.override_from_dict(json.loads(text))

    def to_json(self, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
        """Return the values as a JSON object."""
        return json.dumps(self._values, indent=indent, separators=separators, sort_keys=sort_keys)

    def parse(self, text: str) -> HParams:
        """Replace the values of `name=value,name=[value,value]`."""
        for name, value in _pairs(text):
            if name not in self._values:
                raise ValueError(f"Unknown hyperparameter: {name}")
            self.set_hparam(name, value)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["_values"][name]
        except KeyError:
            raise AttributeError(f"no hyper-parameter {name!r}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return f"HParams({', '.join(f'{name}={value!r}' for name, value in sorted(self._values.items()))})"


def _of_type(old: Any, value: Any, name: str) -> Any:
    if isinstance(value, list):
        return [_of_type(old[0], one, name) for one in value] if old else value
    if old is None or isinstance(value, type(old)):
        return value
    if isinstance(old, bool):
        text = str(value).lower()
        if text not in _TRUE | _FALSE:
            raise ValueError(f"hyper-parameter {name!r} is a bool, which {value!r} cannot replace")
        return text in _TRUE
    try:
        return type(old)(value)
    except (TypeError, ValueError):
        raise ValueError(f"hyper-parameter {name!r} is {old!r}, which {value!r} cannot replace") from None


def _pairs(text: str) -> list[tuple[str, Any]]:
    """Read `a=1,b=[1,2],c=x`."""
    found: list[tuple[str, Any]] = []
    rest = text.strip()
    while rest:
        name, equals, rest = rest.partition("=")
        if not equals:
            raise ValueError(f"Could not parse hparam: {name}")
        rest = rest.lstrip()
        if rest.startswith("["):
            inside, closing, rest = rest[1:].partition("]")
            if not closing:
                raise ValueError(f"Could not parse hparam: {name}=[{inside}")
            found.append((name.strip(), [one.strip() for one in inside.split(",") if one.strip()]))
            rest = rest.lstrip().removeprefix(",")
        else:
            value, _, rest = rest.partition(",")
            found.append((name.strip(), value.strip()))
    return found
