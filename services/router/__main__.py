"""`python -m services.router`: run a router."""

from __future__ import annotations

import catenary.grpc_environment  # noqa: F401
from catenary.config import load
from catenary.runtime import run
from services.router.app import serve
from services.router.config import RouterConfig

if __name__ == "__main__":
    config = load(RouterConfig, None, prog="router")
    run(lambda stop: serve(config, stop))
