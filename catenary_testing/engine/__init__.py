"""An engine without a model: replays a script, or makes each token a hash that any test can compute."""

from __future__ import annotations

from catenary_testing.engine.app import ScriptedEngineApp, ScriptedEngineConfig
from catenary_testing.engine.core import ScriptedCore
from catenary_testing.engine.faults import Faults
from catenary_testing.engine.machine import ScriptedMachine
from catenary_testing.engine.script import (
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
from catenary_testing.engine.tokens import (
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
    "ScriptedEngineApp",
    "ScriptedEngineConfig",
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
