"""Errors as OpenAI's API shows them. Owns the form; who raises one decides the words."""

from dataclasses import dataclass

from anabranch.core.request import FieldError


@dataclass(eq=False)  # exceptions are told apart by identity
class ApiError(Exception):
    """An HTTP error: {"error": {message, type, param, code}} with `status`.

    retry_after: seconds, sent as a header with 429 and 503.
    """

    status: int
    message: str
    type: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def body(self) -> dict[str, dict[str, str | int | None]]:
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }

    @property
    def headers(self) -> dict[str, str]:
        found = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        if self.status == 401:
            found["WWW-Authenticate"] = "Bearer"
        return found


def bad_field(name: str, message: str, code: str = "invalid_value") -> ApiError:
    """A 400 whose message begins with the field's name."""
    return ApiError(400, f"{name}: {message}", code=code, param=name)


def from_field_error(error: FieldError, names: dict[str, str] | None = None) -> ApiError:
    """`names`: our field names -> the names the endpoint's user knows."""
    name = (names or {}).get(error.field, error.field)
    message = str(error).removeprefix(f"{error.field}: ")
    code = "context_length_exceeded" if "context length" in message else "invalid_value"
    return bad_field(name, message, code)


def engine_error(message: str) -> ApiError:
    return ApiError(500, message, type="server_error", code="engine_error")


def unavailable(message: str, code: str) -> ApiError:
    return ApiError(503, message, type="server_error", code=code, retry_after=5)
