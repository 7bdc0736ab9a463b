"""HTTP below the routes: the server, its limits, bodies, disconnects."""

from __future__ import annotations

from gateway.http.answers import Deleted, Page, Status, Version, json_response, page_of
from gateway.http.body import NUMBERS, BodyLimits, decode_json, read_json_object, too_many_values
from gateway.http.context import HEALTH_PATHS, Observer, RequestContext
from gateway.http.disconnect import ClientGone, ClientWatch, SlowReader
from gateway.http.parts import PartSender, part_sender
from gateway.http.protocol import HttpLimits
from gateway.http.query import Choice, Integer, Parameter, Text, query_of
from gateway.http.respond import Deferred, Fields, error_response, send_error, send_json
from gateway.http.server import HttpServer

__all__ = [
    "HEALTH_PATHS",
    "NUMBERS",
    "BodyLimits",
    "Choice",
    "ClientGone",
    "ClientWatch",
    "Deferred",
    "Deleted",
    "Fields",
    "HttpLimits",
    "HttpServer",
    "Integer",
    "Observer",
    "Page",
    "Parameter",
    "PartSender",
    "RequestContext",
    "SlowReader",
    "Status",
    "Text",
    "Version",
    "decode_json",
    "error_response",
    "json_response",
    "page_of",
    "part_sender",
    "query_of",
    "read_json_object",
    "send_error",
    "send_json",
    "too_many_values",
]
