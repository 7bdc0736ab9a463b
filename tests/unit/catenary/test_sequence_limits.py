"""The table of limits: services take what the one before them lets through, and options have its defaults."""

from __future__ import annotations

import pytest

from catenary import sequence_limits
from catenary.sequence_limits import BAD_WORDS, BEAM_NUMBERS, BEAM_WIDTH, Limit
from gateway.config import GatewayConfig
from gateway.schemas.base import RequestLimits
from services.engine.config import EngineConfig
from services.engine.servicer import SequenceLimits

LIMITS = {name: value for name, value in vars(sequence_limits).items() if isinstance(value, Limit)}


@pytest.mark.parametrize("name", LIMITS)
def test_what_the_gateway_takes_by_default_is_taken_by_router_and_engine(name: str) -> None:
    limit = LIMITS[name]
    assert max(limit.gateway, limit.router, limit.engine) > 0
    assert not limit.router or max(limit.gateway, limit.engine) <= limit.router
    assert not limit.engine or limit.gateway <= limit.engine


def test_an_engine_takes_a_bad_word_with_and_without_a_space_before_it() -> None:
    assert BAD_WORDS.engine >= 2 * BAD_WORDS.gateway


def test_options_have_the_defaults_of_the_table() -> None:
    gateway, engine = GatewayConfig.model_fields, EngineConfig.model_fields
    for fields, limits in ((gateway, RequestLimits()), (engine, SequenceLimits())):
        for name in limits.__dataclass_fields__:
            assert fields[name].default == getattr(limits, name), name
    assert engine["max_beam_width"].default == BEAM_WIDTH.engine
    assert engine["max_beam_numbers"].default == BEAM_NUMBERS.engine
