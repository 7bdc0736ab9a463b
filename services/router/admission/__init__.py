"""Admission: what is let in, how it is counted, how it is refused. Pure."""

from __future__ import annotations

from services.router.admission.admission import Admission, AdmissionLimits
from services.router.admission.guard import Ledger, LoadGuard
from services.router.admission.refusal import Refused
from services.router.admission.validation import (
    MAX_NAME_LENGTH,
    SpecLimits,
    sequences_of,
    validate,
    validate_task,
)

__all__ = [
    "MAX_NAME_LENGTH",
    "Admission",
    "AdmissionLimits",
    "Ledger",
    "LoadGuard",
    "Refused",
    "SpecLimits",
    "sequences_of",
    "validate",
    "validate_task",
]
