"""Typed reading of a parsed JSON object: every error names the field, what was wanted and found.

Knows nothing of models; null counts as absent, as in published configuration files.
"""

import math
from collections.abc import Mapping


class Fields:
    """A JSON object whose fields are asked for by type. `where` is put before field names."""

    def __init__(self, data: Mapping[str, object], where: str = "") -> None:
        self._data = data
        self._where = f"{where}." if where else ""

    def _wrong(self, name: str, wanted: str) -> ValueError:
        return ValueError(f"{self._where}{name}: wanted {wanted}, found {self._data.get(name)!r}")

    def has(self, name: str) -> bool:
        """Whether the field is there, perhaps as null."""
        return name in self._data

    def require(self, *names: str) -> None:
        """ValueError that lists every one of `names` that the object lacks (a null is present)."""
        absent = [self._where + name for name in names if name not in self._data]
        if absent:
            raise ValueError(f"required fields absent: {', '.join(absent)}")

    def nested(self, name: str) -> "Fields | None":
        value = self._data.get(name)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object")
        return Fields(value, self._where + name)

    def optional_integer(self, name: str, minimum: int = 1) -> int | None:
        value = self._data.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not minimum <= value < 2**31:
            raise self._wrong(name, f"an integer from {minimum} to {2**31 - 1}")
        return value

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.optional_integer(name, minimum)
        if value is not None:
            return value
        if default is None:
            raise self._wrong(name, "an integer")
        return default

    def optional_number(self, name: str) -> float | None:
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(name, "a number")
        if not math.isfinite(value) or value < 0:
            raise self._wrong(name, "a finite number that is not negative")
        return float(value)

    def number(self, name: str, default: float | None = None) -> float:
        """A number above 0."""
        value = self.optional_number(name)
        if value is None and default is not None:
            return default
        if not value:
            raise self._wrong(name, "a number above 0")
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        value = self._data.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, "a string")
        return value

    def strings(self, name: str) -> tuple[str, ...] | None:
        value = self._data.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise self._wrong(name, "a list of strings")
        return tuple(value)

    def integers(self, name: str, minimum: int = 0) -> tuple[int, ...]:
        """One integer or a list of them; absent is none."""
        value = self._data.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(v, int) and not isinstance(v, bool) and v >= minimum for v in found):
            raise self._wrong(name, f"an integer or a list of integers, none under {minimum}")
        return tuple(found)
