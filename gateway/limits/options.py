"""The limiter that the gateway's options ask for."""

from __future__ import annotations

from collections.abc import Mapping

from catenary.config import ConfigError
from gateway.auth import owner_name
from gateway.config import GatewayConfig
from gateway.key_file import read_key_file
from gateway.limits.limiter import KeyLimits, Limiter


def limiter_of(config: GatewayConfig) -> Limiter | None:
    """None if no limit is set. Raises StartRefused for a store that is none, or a bad file of keys."""
    limits = KeyLimits(
        requests_per_minute=config.key_requests_per_minute,
        tokens_per_minute=config.key_tokens_per_minute,
        concurrent=config.key_concurrent,
        refuse_when_away=config.limits_store_away == "refuse",
    )
    keys = {} if config.api_key_file is None else read_key_file(config.api_key_file)
    own = {owner_name(key.encode()): _own(limits, given) for key, given in keys.items() if given}
    if not (limits or any(own.values())):
        return None
    if config.limits_store is None:
        return Limiter(limits, own=own)
    # Redis is imported only where it is used: it is large.
    from gateway.limits.shared import SharedCounters  # noqa: PLC0415

    try:
        counters = SharedCounters(config.limits_store, timeout_s=config.limits_store_timeout_s)
    except ValueError:
        raise ConfigError("--limits-store: must be redis://HOST:PORT/DB") from None
    return Limiter(limits, counters, own=own)


def _own(common: KeyLimits, given: Mapping[str, int]) -> KeyLimits:
    return KeyLimits(
        requests_per_minute=given.get("requests_per_minute", common.requests_per_minute),
        tokens_per_minute=given.get("tokens_per_minute", common.tokens_per_minute),
        concurrent=given.get("concurrent", common.concurrent),
        refuse_when_away=common.refuse_when_away,
    )
