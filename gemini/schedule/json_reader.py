"""JSON reader: every value carries its file and position, for error messages.

read_json(path)["blocks"].items()[3]["span"].number()
→ plan.json: blocks[3].span: 'two' is not a number
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from gemini.errors import ArtifactError
from gemini.nearest_name import remedy
from gemini.schedule.block import Number, is_number


@dataclass(frozen=True)
class Field:
    """A value of a JSON file and its position."""

    source: str
    place: str
    value: object

    def error(self, what: str, remedy: str = "") -> ArtifactError:
        """An error at this place."""
        where = f"{self.source}: {self.place}" if self.place else self.source
        return ArtifactError(f"{where}: {what}" + (f"\n    → {remedy}" if remedy else ""))

    def __getitem__(self, key: str) -> Field:
        entries = self._mapping()
        if key not in entries:
            raise self.error(f"{key!r} is missing", "the file is not complete: write it again")
        return Field(self.source, f"{self.place}.{key}" if self.place else key, entries[key])

    def __contains__(self, key: str) -> bool:
        return key in self._mapping()

    def get(self, key: str, default: object) -> Field:
        """The value at `key`, or `default` where there is none."""
        if key in self:
            return self[key]
        return Field(self.source, f"{self.place}.{key}" if self.place else key, default)

    def keys(self) -> list[str]:
        """The names in this object."""
        return list(self._mapping())

    def only(self, *keys: str) -> None:
        """Refuse names other than `keys`: a misspelt key must not be ignored silently."""
        for key in self._mapping():
            if key not in keys:
                raise self.error(f"unknown name {key!r}", remedy(key, keys))

    def items(self) -> list[Field]:
        """The entries of a list."""
        if not isinstance(self.value, list):
            self._refuse("a list")
        return [Field(self.source, f"{self.place}[{index}]", value) for index, value in enumerate(self.value)]

    def integer(self, at_least: int | None = None) -> int:
        """An integer (not true, not 1.0)."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            self._refuse("an integer")
        if at_least is not None and self.value < at_least:
            raise self.error(f"{self.value} is less than {at_least}", f"give {at_least} or more")
        return self.value

    def number(self) -> Number:
        """A finite integer or real, in its own type."""
        if not is_number(self.value) or not isinstance(self.value, (int, float)):
            self._refuse("a finite number")
        return self.value

    def text(self) -> str:
        """A string."""
        if not isinstance(self.value, str):
            self._refuse("a text")
        return self.value

    def boolean(self) -> bool:
        """True or false."""
        if not isinstance(self.value, bool):
            self._refuse("true or false")
        return self.value

    def _mapping(self) -> dict[str, object]:
        if not isinstance(self.value, dict):
            self._refuse("an object with names")
        return self.value

    def _refuse(self, wanted: str) -> NoReturn:
        shown = json.dumps(self.value)
        raise self.error(f"{shown if len(shown) <= 40 else shown[:37] + '…'} is not {wanted}")


def read_json(path: Path) -> Field:
    """Parse the whole file; errors name the position."""
    try:
        text = path.read_bytes().decode("utf-8")
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except OSError as error:
        raise ArtifactError(
            f"cannot read {path}: {error.strerror or error}\n    → give the path of a saved plan"
        ) from error
    except UnicodeDecodeError as error:
        raise ArtifactError(f"{path}: not a text file (byte {error.start})\n    → give a JSON file") from error
    except json.JSONDecodeError as error:
        end = "breaks off" if error.pos >= len(text.rstrip()) else "is not JSON"
        raise ArtifactError(
            f"{path}: line {error.lineno}, column {error.colno}: the file {end} ({error.msg})\n"
            "    → it was cut or edited: write it again"
        ) from error
    except (ValueError, RecursionError) as error:  # a name twice, a number without end, too many brackets
        raise ArtifactError(f"{path}: {error}\n    → it was edited: write it again") from error
    return Field(str(path), "", value)


class _DuplicateError(ValueError):
    """An object names the same thing twice; json would silently use the last."""


def _no_duplicates(pairs: Iterable[tuple[str, object]]) -> dict[str, object]:
    result: dict[str, object] = {}
    for key, value in pairs:
        if key in result:
            raise _DuplicateError(f"the name {key!r} occurs twice in one object")
        result[key] = value
    return result
