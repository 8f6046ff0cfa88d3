"""Errors of requests, in the shape that OpenAI's interface gives them."""

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
    """Ends a request with a status, a message, the field that is wrong and a word for programs."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, TYPES[400])
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}


def wrong(param: str, value: object, expected: str) -> ApiError:
    """Returns the error for a field of a wrong value."""
    told = repr(value)
    told = told if len(told) <= 100 else f"{told[:100]}…"
    return ApiError(400, f"{param} is {told}; expected {expected}", param=param)
