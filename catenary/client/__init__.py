"""Clients of Catenary's gRPC side: token ids or text in, and out."""

from __future__ import annotations

from catenary.client.async_client import AsyncClient
from catenary.client.client import Client
from catenary.client.options import Answer, GenerateOptions, TextDelta, Usage

__all__ = ["Answer", "AsyncClient", "Client", "GenerateOptions", "TextDelta", "Usage"]
