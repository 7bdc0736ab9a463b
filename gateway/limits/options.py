"""The limiter that the gateway's options ask for."""

from __future__ import annotations

from catenary.runtime import StartRefused
from gateway.config import GatewayConfig
from gateway.limits.limiter import KeyLimits, Limiter


def limiter_of(config: GatewayConfig) -> Limiter | None:
    """None if no limit is set. Raises StartRefused for a store that is none."""
    limits = KeyLimits(
        requests_per_minute=config.key_requests_per_minute,
        tokens_per_minute=config.key_tokens_per_minute,
        concurrent=config.key_concurrent,
        refuse_when_away=config.limits_store_away == "refuse",
    )
    if not limits:
        return None
    if config.limits_store is None:
        return Limiter(limits)
    # Redis is imported only where it is used: it is large.
    from gateway.limits.shared import SharedCounters  # noqa: PLC0415

    try:
        return Limiter(limits, SharedCounters(config.limits_store, timeout_s=config.limits_store_timeout_s))
    except ValueError:
        raise StartRefused("--limits-store: must be redis://HOST:PORT/DB") from None
