"""The engine's side of a lease: how long a silent router keeps its sequences here."""

from __future__ import annotations

from catenary.schema import MINIMUM_PEER_REVISION, revision_mismatch
from catenary.v1 import engine_pb2

# The lease is the router's option (--lease-ms); a shorter one would run out in any pause of a process.
_SHORTEST_LEASE_MS = 50


class LeaseRefused(Exception):
    """The router's answer makes no lease; the text says why."""


class Lease:
    """An epoch and the time of the last word from its router. Times are seconds of any steady clock."""

    def __init__(self, attached: engine_pb2.Attached, *, now: float, orphan_timeout_s: float) -> None:
        """Raises LeaseRefused if the schema revisions do not fit or the terms cannot be kept."""
        if attached.schema_revision < MINIMUM_PEER_REVISION:
            mismatch = revision_mismatch(attached.schema_revision, 0, peer="router")
            raise LeaseRefused(mismatch or "the router's schema revision is unknown")
        if attached.lease_epoch == 0:
            raise LeaseRefused("the router granted no lease epoch")
        if attached.lease_ms < _SHORTEST_LEASE_MS or not 0 < attached.report_interval_ms < attached.lease_ms:
            raise LeaseRefused(
                f"the router wants a report each {attached.report_interval_ms} ms in a lease of "
                f"{attached.lease_ms} ms; that cannot be kept"
            )
        self.epoch = attached.lease_epoch
        self.router = attached.router_instance_id
        self.interval_s = attached.report_interval_ms / 1000
        self.limit_s = min(attached.lease_ms / 1000, orphan_timeout_s)
        self._heard = now

    def heard(self, now: float) -> None:
        """A message of the router came."""
        self._heard = now

    def left_s(self, now: float) -> float:
        """Seconds until the lease runs out; 0 or less: it has."""
        return self._heard + self.limit_s - now
