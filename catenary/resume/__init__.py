"""Failover: a sequence that lost its engine or its router goes on elsewhere, and nobody notices. Pure.

The gateway and the router's plain `Generate` both keep a `Resumable` for each live sequence.
"""

from __future__ import annotations

from catenary.resume.failure import GOOD_ENDS, Cause, Failure
from catenary.resume.options import ResumeOptions
from catenary.resume.poison import PoisonedRequests, fingerprint
from catenary.resume.policy import ResumePolicy
from catenary.resume.resumable import POISONED, Resumable
from catenary.resume.verdict import Again, Finished, GivenUp, Passed, Verdict

__all__ = [
    "GOOD_ENDS",
    "POISONED",
    "Again",
    "Cause",
    "Failure",
    "Finished",
    "GivenUp",
    "Passed",
    "PoisonedRequests",
    "Resumable",
    "ResumeOptions",
    "ResumePolicy",
    "Verdict",
    "fingerprint",
]
