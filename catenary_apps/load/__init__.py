"""Load on servers of the OpenAI API, and what it shows: latencies, throughput, goodput.

Imports no service and no engine; needs the extra `bench`, plots aside.
"""

from __future__ import annotations

from catenary_apps.load.answers import shown
from catenary_apps.load.conversations import (
    Conversation,
    Lengths,
    PlainWords,
    Source,
    TokenizerText,
    TokenRange,
    Turn,
    parse_lengths,
    random_conversations,
)
from catenary_apps.load.files import FileLimits, lines_conversations, sharegpt_conversations
from catenary_apps.load.load import LoadInterrupted, Progress, run, run_load
from catenary_apps.load.plan import (
    MIN_RATE,
    Arrivals,
    LoadPlan,
    Ramp,
    RampShape,
    parse_objectives,
)
from catenary_apps.load.results import LoadResult, as_json
from catenary_apps.load.statistics import Distribution, percentile_name, timeline
from catenary_apps.load.target import BenchError, Endpoint, Target

__all__ = [
    "MIN_RATE",
    "Arrivals",
    "BenchError",
    "Conversation",
    "Distribution",
    "Endpoint",
    "FileLimits",
    "Lengths",
    "LoadInterrupted",
    "LoadPlan",
    "LoadResult",
    "PlainWords",
    "Progress",
    "Ramp",
    "RampShape",
    "Source",
    "Target",
    "TokenRange",
    "TokenizerText",
    "Turn",
    "as_json",
    "lines_conversations",
    "parse_lengths",
    "parse_objectives",
    "percentile_name",
    "random_conversations",
    "run",
    "run_load",
    "sharegpt_conversations",
    "shown",
    "timeline",
]
