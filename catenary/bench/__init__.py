"""Load on servers of the OpenAI API, and what it shows: latencies, throughput, goodput.

It knows no service and no engine; it needs the extra `bench` without the plots.
"""

from __future__ import annotations

from catenary.bench.arrivals import MIN_RATE, Arrivals, Ramp, RampShape
from catenary.bench.chunks import shown
from catenary.bench.conversations import Conversation, Turn, random_conversations
from catenary.bench.files import FileLimits, lines_conversations, sharegpt_conversations
from catenary.bench.lengths import Lengths, parse_lengths
from catenary.bench.load import LoadInterrupted, Progress, run, run_load
from catenary.bench.objectives import parse_objectives
from catenary.bench.plan import DEFAULT_PERCENTILES, LoadPlan
from catenary.bench.records import Record
from catenary.bench.report import as_json, distribution_json
from catenary.bench.results import LoadResult
from catenary.bench.sources import PlainWords, Source, TokenizerText, TokenRange
from catenary.bench.statistics import Distribution, describe, percentile_name
from catenary.bench.target import BenchError, Endpoint, Target
from catenary.bench.timeline import Timeline, timeline

__all__ = [
    "DEFAULT_PERCENTILES",
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
    "Record",
    "Source",
    "Target",
    "Timeline",
    "TokenRange",
    "TokenizerText",
    "Turn",
    "as_json",
    "describe",
    "distribution_json",
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
