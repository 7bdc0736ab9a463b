"""The router's gRPC services."""

from __future__ import annotations

from services.router.service.attach import AttachTerms, FleetServicer
from services.router.service.generate import GenerateCalls
from services.router.service.publish import KvStreams
from services.router.service.router_service import RouterServicer
from services.router.service.sessions import SessionStreams

__all__ = ["AttachTerms", "FleetServicer", "GenerateCalls", "KvStreams", "RouterServicer", "SessionStreams"]
