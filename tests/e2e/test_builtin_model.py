"""The model that comes with the installation, as it is prepared."""

from __future__ import annotations

import pytest

from services.engine.model import prepare_model, read_config, read_facts

pytestmark = pytest.mark.model


def test_samples_as_its_authors_advise() -> None:
    directory = prepare_model("smollm2")
    facts = read_facts(directory, read_config(directory))
    assert (facts.temperature, facts.top_p) == (0.2, 0.9)
