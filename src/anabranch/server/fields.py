"""Typed, limited reading of a JSON body: the one place where request fields are checked.

Every value is read by `Fields` with its type and range; what nobody reads is refused by name,
unless it is a field of OpenAI's API that changes nothing here. null is the same as absent, as in
OpenAI's clients.
"""

import json
from collections.abc import Iterable
from math import isfinite, nan

from anabranch.server.errors import ApiError, bad_field
from anabranch.text.tokenizer import Json

# fields of OpenAI's API that change nothing in what is generated here
HARMLESS = frozenset(
    (
        *("metadata", "user", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "parallel_tool_calls", "reasoning_effort", "verbosity"),
    )
)
_SHOWN = 60


def parse_body(data: bytes) -> dict[str, Json]:
    """The JSON object in `data`. NaN and infinities are a 400 that names their field; so are bad
    UTF-8 and bottomless nesting.
    """
    constants: list[str] = []

    def note(constant: str) -> float:
        constants.append(constant)
        return nan

    try:
        body: Json = json.loads(data.decode("utf-8"), parse_constant=note)
        named = [k for k, v in body.items() if _holds_nan(v)] if isinstance(body, dict) else []
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise ApiError(400, f"the body is not valid JSON: {reason}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_json")
    if named:
        raise bad_field(shown(named[0])[1:-1], f"holds {constants[0]}, which is not JSON")
    return body


def _holds_nan(value: Json) -> bool:
    if isinstance(value, dict):
        return any(map(_holds_nan, value.values()))
    if isinstance(value, list):
        return any(map(_holds_nan, value))
    return value != value  # only NaN differs from itself


def shown(value: object) -> str:
    """A value as an error message quotes it: short, whatever it is."""
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def check_text(name: str, value: Json, limit: int | None = None) -> str:
    """A string that UTF-8 can carry (JSON can smuggle in half a surrogate pair)."""
    if not isinstance(value, str):
        raise bad_field(name, f"must be a string, got {shown(value)}", "invalid_type")
    if limit is not None and len(value) > limit:
        raise bad_field(name, f"must have at most {limit} characters, got {len(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise bad_field(name, f"holds half a surrogate pair at character {error.start}") from None
    return value


def check_integer(name: str, value: Json, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise bad_field(name, f"must be an integer, got {shown(value)}", "invalid_type")
    if not low <= value <= high:
        raise bad_field(name, f"must be between {low} and {high}, got {shown(value)}")
    return value


class Fields:
    """The fields of one JSON object; each getter takes its field out, `finish` refuses the rest."""

    def __init__(self, body: dict[str, Json], prefix: str = "") -> None:
        self._left = dict(body)
        self._prefix = prefix

    def take(self, name: str) -> Json:
        """The raw value, or None if it is absent or null."""
        return self._left.pop(name, None)

    def name(self, name: str) -> str:
        return self._prefix + name

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.take(name)
        return None if value is None else check_integer(self.name(name), value, low, high)

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.take(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise bad_field(
                self.name(name), f"must be a number, got {shown(value)}", "invalid_type"
            )
        if not (low <= value <= high and isfinite(value)):
            message = f"must be between {low:g} and {high:g}, got {shown(value)}"
            raise bad_field(self.name(name), message)
        return float(value)

    def boolean(self, name: str) -> bool:
        value = self.take(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            message = f"must be true or false, got {shown(value)}"
            raise bad_field(self.name(name), message, "invalid_type")
        return value

    def text(self, name: str, limit: int) -> str | None:
        value = self.take(name)
        return None if value is None else check_text(self.name(name), value, limit)

    def object(self, name: str) -> dict[str, Json] | None:
        value = self.take(name)
        if value is not None and not isinstance(value, dict):
            raise bad_field(
                self.name(name), f"must be an object, got {shown(value)}", "invalid_type"
            )
        return value

    def texts(self, name: str, most: int, limit: int) -> tuple[str, ...]:
        """A string, or a list of up to `most` strings of 1 to `limit` characters."""
        value = self.take(name)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if len(items) > most:
            raise bad_field(self.name(name), f"at most {most} strings, got {len(items)}")
        found = tuple(check_text(self.name(name), item, limit) for item in items)
        if "" in found:
            raise bad_field(self.name(name), "holds an empty string")
        return found

    def integers(self, name: str, most: int, low: int, high: int) -> tuple[int, ...]:
        value = self.take(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            message = f"must be a list of integers, got {shown(value)}"
            raise bad_field(self.name(name), message, "invalid_type")
        if len(value) > most:
            raise bad_field(self.name(name), f"at most {most} integers, got {len(value)}")
        return tuple(check_integer(self.name(name), item, low, high) for item in value)

    def only(self, name: str, allowed: Iterable[Json], why: str) -> None:
        """A field of the API that is served with these values alone (null always is)."""
        value = self.take(name)
        # `1 == True` in Python, not in JSON
        if value is not None and not any(v == value and type(v) is type(value) for v in allowed):
            raise bad_field(
                self.name(name), f"{shown(value)} is refused: {why}", "unsupported_value"
            )

    def finish(self, harmless: frozenset[str] = frozenset()) -> None:
        for name in self._left:
            if name not in harmless:
                full = self.name(name)
                raise bad_field(shown(full)[1:-1], "is not a known field", "unknown_parameter")
