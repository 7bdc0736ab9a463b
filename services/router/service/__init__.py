"""The router's gRPC services."""

from __future__ import annotations

from services.router.service.fleet_service import AttachTerms, FleetServicer, KvStreams
from services.router.service.router_service import GenerateCalls, RouterServicer, SessionStreams
from services.router.service.streams import ReaderWatch

__all__ = [
    "AttachTerms",
    "FleetServicer",
    "GenerateCalls",
    "KvStreams",
    "ReaderWatch",
    "RouterServicer",
    "SessionStreams",
]
