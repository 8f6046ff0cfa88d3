"""Errors of requests, in the format of OpenAI's interface."""

from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


class ApiError(Exception):
    """An error that ends a request.

    Attributes:
      status: the HTTP status.
      message: the message for people.
      param: the request field with the error, or None.
      code: a short name of the error for programs, or None.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        """Returns the body of the response."""
        kind = TYPES.get(self.status, TYPES[400])
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid_field(param: str, value: object, expected: str) -> ApiError:
    """Returns the error for a field with an invalid value."""
    shown = repr(value)
    shown = shown if len(shown) <= 100 else f"{shown[:100]}…"
    return ApiError(400, f"{param} is {shown}; expected {expected}", param=param)
