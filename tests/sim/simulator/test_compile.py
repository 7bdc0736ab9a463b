"""torch.compile, compile-only mode and the recipe cache on the card (gaudi-facts.md 2.2, 2.4, 4.1)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.engine.device import sim

OPTIONS = {"force_static_compile": True}


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(function: Any, options: Any = None) -> Any:
    return torch.compile(function, backend="hpu_backend", dynamic=False, options=options)


def layer(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    cache.add_(x.sum())
    return torch.relu(x) * 2


@torch.inference_mode()
def test_a_graph_is_one_recipe_for_each_shape(new_card: Any) -> None:
    card = new_card()
    function = compiled(layer, OPTIONS)
    cache = torch.zeros(1, device="hpu")
    for length, recipes in ((3, 1), (4, 2), (3, 2)):
        x = torch.arange(-1.0, length - 1).to("hpu")
        before = card.counters.compilations - card.counters.backend_compilations
        torch.testing.assert_close(function(x, cache).cpu(), torch.relu(x.cpu()) * 2)
        assert card.counters.backend_compilations == recipes
        assert card.counters.compilations - card.counters.backend_compilations == before
    assert cache.item() == 0 + 2 + 0
    assert card.counters.compile_seconds > 0


# An HPU device that another test opened has raised the limit for good.
@torch._dynamo.config.patch(recompile_limit=8)
@torch.inference_mode()
def test_beyond_dynamos_limit_shapes_are_compiled_one_operation_at_a_time(new_card: Any) -> None:
    card = new_card()
    function = compiled(lambda x: x * 2 + 1)
    steps = []
    for length in range(1, 13):
        x = torch.ones(length).to("hpu")
        before = (card.counters.backend_compilations, card.counters.compilations)
        function(x)
        steps.append((card.counters.backend_compilations - before[0], card.counters.compilations - before[1]))
    assert steps == [(1, 1)] * 8 + [(0, 2)] * 4


@torch.inference_mode()
def test_refusals(new_card: Any) -> None:
    new_card()
    x = torch.ones(2).to("hpu")
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="not \\['magic'\\]"):
        compiled(torch.sin, {"magic": True})(x)
    new_card(lazy=True)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="Invalid backend: 'hpu_backend'"):
        compiled(torch.cos)(torch.ones(2).to("hpu"))


@torch.inference_mode()
def test_compile_only_mode_counts_and_leaves_garbage(new_card: Any) -> None:
    from habana_frameworks.torch.internal.bridge_config import env_setting

    card = new_card()
    function = compiled(layer)
    x, where = torch.ones(3).to("hpu"), torch.tensor([1]).to("hpu")
    cache, rows = torch.zeros(1, device="hpu"), torch.zeros(3, 2, device="hpu")
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        out = function(x, cache)
        rows.index_copy_(0, where, torch.ones(1, 2).to("hpu"))
        picked = out.argmax()
        view = out[1:]
    assert card.counters.backend_compilations == 1
    assert out.isnan().all().item()
    assert view.isnan().all().item()
    assert picked.item() > 2**30
    assert cache.isnan().all().item()
    assert rows.isnan().any(1).tolist() == [False, True, False]
    cache.zero_()
    before = card.counters.backend_compilations
    assert function(x, cache).tolist() == [2.0, 2.0, 2.0]
    assert card.counters.backend_compilations == before
    with pytest.raises(KeyError), env_setting("PT_NO_SUCH_SETTING", True):
        pass


@torch.inference_mode()
def test_compile_only_mode_covers_graphs_and_fused_kernels(new_card: Any) -> None:
    import habana_frameworks.torch as ht
    from habana_frameworks.torch.hpex.kernels import FusedSDPA
    from habana_frameworks.torch.internal.bridge_config import env_setting

    card = new_card(lazy=True)
    q = torch.ones(1, 2, 4, 8).to("hpu")
    function = ht.hpu.wrap_in_hpu_graph_func(lambda q: FusedSDPA.apply(q, q, q, None, 0.0, True))
    with env_setting("PT_COMPILE_ONLY_MODE", True):
        assert function(q).isnan().all().item()
    torch.testing.assert_close(function(q).cpu(), torch.ones(1, 2, 4, 8))
    assert (card.counters.captures, card.counters.replays) == (1, 1)


@torch.inference_mode()
def test_a_second_start_loads_recipes(new_card: Any, tmp_path: Path) -> None:
    environment = {"PT_HPU_RECIPE_CACHE_CONFIG": f"{tmp_path}/recipes,false,64", "RANK": "1"}
    new_card()
    seconds = []
    for _ in range(2):
        card = sim.reset(sim.SimSettings(lock_directory=tmp_path), environment)
        assert torch.sin(torch.ones(3).to("hpu")).shape == (3,)
        seconds.append(card.counters.compile_seconds)
        counted = (card.counters.compilations, card.counters.recipe_hits, card.counters.recipe_misses)
        assert counted == ((1, 0, 1) if len(seconds) == 1 else (0, 1, 0))
    assert seconds[1] < seconds[0] / 5
    assert (tmp_path / "recipes1").is_dir()
    (tmp_path / "file").touch()
    sim.reset(sim.SimSettings(lock_directory=tmp_path), {"PT_HPU_RECIPE_CACHE_CONFIG": f"{tmp_path}/file/x"})
    with pytest.raises(RuntimeError, match="Recipe cache path is expected"):
        torch.ones(3).to("hpu")


@torch.inference_mode()
def test_tensors_made_in_a_compiled_function_are_of_the_device(new_card: Any) -> None:
    new_card()

    def body(x: torch.Tensor, nothing: torch.Tensor) -> torch.Tensor:
        if nothing.shape[0]:
            return nothing
        position = torch.arange(x.shape[0], device=x.device)
        mask = position.unsqueeze(1) >= position.unsqueeze(0)
        return torch.where(mask, x, torch.zeros(1, device=x.device))

    x = torch.ones(3, 3)
    out = torch.compile(body, backend="hpu_backend", fullgraph=True, dynamic=False)(
        x.to("hpu"), torch.zeros(0, device="hpu")
    )
    torch.testing.assert_close(out.cpu(), x.tril())
    assert torch.arange(2, 8, 3, device="hpu").shape == (2,)
    assert torch.eye(2, device="hpu").tolist() == [[1.0, 0.0], [0.0, 1.0]]
