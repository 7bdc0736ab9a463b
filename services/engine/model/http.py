"""GET requests for model hubs, with a token that stays with the host that it is for."""

from __future__ import annotations

import urllib.error
import urllib.request
from http.client import HTTPMessage, HTTPResponse
from typing import IO, Final
from urllib.parse import urlsplit

# Without one byte from the hub, not for the whole of a file: a slow line is no failure.
_TIMEOUT_S: Final = 60.0


class HttpStatus(Exception):
    """The server answered with an error; its code is in `code`."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"HTTP status {code} {reason}".strip())
        self.code = code


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https, and leaves the credentials behind when the host changes."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        request = super().redirect_request(req, fp, code, msg, headers, newurl)
        if request is None:
            return None
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise HttpStatus(code, "with a redirect to another kind of URL")
        if urlsplit(newurl)[:2] != urlsplit(req.full_url)[:2]:
            for name in ("Cookie", "Authorization"):
                request.remove_header(name)
        return request


class Client:
    """Sends GET requests. Proxies come from the environment (HTTPS_PROXY, NO_PROXY)."""

    def __init__(self, *, token: str = "") -> None:
        self._token = token
        self._opener = urllib.request.build_opener(_Redirects())

    def get(self, url: str) -> HTTPResponse:
        """The answer, to be read in pieces and closed. Raises HttpStatus and OSError."""
        # ModelScope knows its users by a cookie.
        headers = {"User-Agent": "catenary"} | (
            {"Cookie": f"m_session_id={self._token}"} if self._token else {}
        )
        try:
            answer = self._opener.open(urllib.request.Request(url, headers=headers), timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            error.close()
            raise HttpStatus(error.code, str(error.reason)) from None
        if not isinstance(answer, HTTPResponse):
            raise HttpStatus(0, "is no HTTP answer")
        return answer
