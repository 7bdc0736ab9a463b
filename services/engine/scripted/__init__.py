"""An engine without a model: replays a script, or makes each token a hash that any test can compute."""

from __future__ import annotations

from services.engine.scripted.core import ScriptedCore
from services.engine.scripted.faults import Faults
from services.engine.scripted.machine import ScriptedMachine
from services.engine.scripted.script import (
    Match,
    Rule,
    Script,
    ScriptedCapacity,
    ScriptedFaults,
    ScriptedLatency,
    ScriptedModel,
    ScriptError,
    Then,
    load_script,
)
from services.engine.scripted.tokens import (
    best_alternatives,
    classes_of,
    continuation,
    next_token,
    pack_vector,
    sampled_logprob,
    score_of,
    vector_of,
)

__all__ = [
    "Faults",
    "Match",
    "Rule",
    "Script",
    "ScriptError",
    "ScriptedCapacity",
    "ScriptedCore",
    "ScriptedFaults",
    "ScriptedLatency",
    "ScriptedMachine",
    "ScriptedModel",
    "Then",
    "best_alternatives",
    "classes_of",
    "continuation",
    "load_script",
    "next_token",
    "pack_vector",
    "sampled_logprob",
    "score_of",
    "vector_of",
]
