"""`habana_frameworks.torch.hpu.metrics` on the simulated card. gaudi-facts.md 4.4."""

from __future__ import annotations

import pytest
import torch

from tests.sim.conftest import NewCard


def test_graph_compilation_counts_and_times(new_card: NewCard) -> None:
    from habana_frameworks.torch.hpu.metrics import metric_global, metric_localcontext

    new_card(recipe_s=2.0)
    x = torch.ones(4, device="hpu")
    with metric_localcontext("graph_compilation") as step:
        x + x
        x * x
    # The form that step logs rely on: a list whose first pair is the number.
    (name, number), (_, total), (_, average) = step.stats()
    assert (name, number) == ("TotalNumber", 2)
    assert total == pytest.approx(2 * average)
    assert 4.0 < total < 4.1
    x - x
    assert step.stats()[0] == ("TotalNumber", 2), "of what happened inside alone"
    everything = dict(metric_global("graph_compilation").stats())
    assert list(everything) == ["TotalNumber", "TotalTime", "AvgTime"]
    assert everything["TotalNumber"] >= 3
    with metric_localcontext("graph_compilation") as again:
        x + x
    assert again.stats() == [("TotalNumber", 0), ("TotalTime", 0.0), ("AvgTime", 0.0)]


@pytest.mark.parametrize(
    ("metric", "keys"),
    [
        ("cpu_fallback", ["TotalNumber", "FallbackOps"]),
        ("memory_defragmentation", ["TotalNumber", "TotalSuccessful", "AvgTime", "MaxTime"]),
        ("recipe_cache", ["TotalHit", "RecipeHit", "TotalMiss", "RecipeMiss"]),
    ],
)
def test_metrics_have_the_vendors_keys(new_card: NewCard, metric: str, keys: list[str]) -> None:
    from habana_frameworks.torch.hpu.metrics import metric_global

    new_card()
    assert [key for key, _ in metric_global(metric).stats()] == keys


def test_other_names_are_unknown(new_card: NewCard) -> None:
    from habana_frameworks.torch.hpu.metrics import metric_global

    new_card()
    with pytest.raises(KeyError, match="no metric"):
        metric_global("heat")
