"""tf.contrib.training: hyper-parameters as an object."""

from __future__ import annotations

import json
import re
from typing import Any

_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
_PAIR = re.compile(r"\s*(?P<name>\w+)\s*=\s*(?:\[(?P<list>[^\]]*)\]|(?P<value>[^,\[]*))\s*(?:,|$)")


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
        if name not in self._values:
            raise ValueError(f"Unknown hyperparameter: {name}")
        self._values[name] = _convert(self._values[name], value, name)

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
        at = 0
        while at < len(text):
            found = _PAIR.match(text, at)
            if found is None:
                raise ValueError(f"Could not parse hparam: {text[at:]}")
            value = (
                found["value"] if found["list"] is None else [one for one in re.split(r"[\s,]+", found["list"]) if one]
            )
            self.set_hparam(found["name"], value.strip() if isinstance(value, str) else value)
            at = found.end()
        return self

    def __getattr__(self, name: str) -> Any:
        values = self.__dict__.get("_values", {})  # a copy in the making has none
        if name not in values:
            raise AttributeError(f"no hyper-parameter {name!r}")
        return values[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._values[name] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def __repr__(self) -> str:
        return f"HParams({', '.join(f'{name}={value!r}' for name, value in sorted(self._values.items()))})"


def _convert(old: Any, value: Any, name: str) -> Any:
    """Return a value in the type of the one that it replaces."""
    try:
        if isinstance(old, list) and isinstance(value, list):
            return [_convert(old[0], one, name) for one in value] if old else value
        if not isinstance(old, list) and not isinstance(value, list):
            if old is None or isinstance(value, type(old)):
                return value
            return _BOOLS[str(value).lower()] if isinstance(old, bool) else type(old)(value)
    except (KeyError, TypeError, ValueError):
        pass
    raise ValueError(f"hyper-parameter {name!r} is {old!r}, which {value!r} cannot replace")
