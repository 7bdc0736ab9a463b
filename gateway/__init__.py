"""The OpenAI API over HTTP: validation, text and streams in front of the router."""

from __future__ import annotations

from gateway.app import GatewayApp
from gateway.config import GatewayConfig

__all__ = ["GatewayApp", "GatewayConfig"]
