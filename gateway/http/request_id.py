"""The id under which a request is answered and logged."""

from __future__ import annotations

from starlette.datastructures import Headers

from catenary.telemetry import is_request_id, new_id

REQUEST_ID = "x-request-id"


def request_id_of(headers: Headers) -> str:
    """The client's own id if it is a sane one, else a new one."""
    sent = headers.get(REQUEST_ID, "")
    return sent if is_request_id(sent) else new_id("req-")
