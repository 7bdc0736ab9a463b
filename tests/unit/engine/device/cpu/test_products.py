"""Products of the CPU's native kernels equal their reference in torch, for every kind of weight and shape."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from catenary_testing.native import reference
from catenary_testing.native.products import Products, Way
from services.engine.device.cpu.native import Level
from services.engine.device.cpu.structures import WeightKind as Kind
from tests.support.native_kernels import LEVELS_HERE, library_of

# Outputs, inputs, rows: single ones, panel and group edges, odd sizes, and more rows than one block has.
SHAPES = [
    (1, 1, 1),
    (16, 4, 2),
    (31, 33, 7),
    (32, 32, 12),
    (33, 31, 13),
    (100, 70, 5),
    (64, 2, 41),
    (65, 130, 150),
    (17, 4133, 3),
]
ACTIVATIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    lambda x: x,
    torch.nn.functional.silu,
    lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    torch.nn.functional.gelu,
]
kinds = pytest.mark.parametrize("kind", list(Kind), ids=lambda kind: kind.name.lower())


@pytest.fixture(scope="module", params=LEVELS_HERE)
def products(request: pytest.FixtureRequest) -> Products:
    level: Level = request.param
    return Products(library_of(level), threads=2)


def expected_product(kind: Kind, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if kind is Kind.INT8:
        return reference.int8_product(reference.quantize_rows(x), reference.quantize_int8(weight))
    if kind is Kind.INT4:
        return reference.int4_product(x, reference.quantize_int4(weight))
    if kind is Kind.BFLOAT16:
        return reference.bfloat16_product(x, weight)
    return (x.double() @ weight.double().T).float()


def magnitudes(kind: Kind, weight: torch.Tensor) -> torch.Tensor:
    """Of the terms that are summed. An int4 weight is two, which may cancel one another."""
    if kind is not Kind.INT4:
        return weight.abs()
    packed = reference.quantize_int4(weight)
    terms = (packed.whole * packed.scales[..., None]).abs() + packed.offsets.abs()[..., None]
    return terms.flatten(1)[:, : packed.inputs]


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def multiply(products: Products, kind: Kind, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.zeros(x.shape[0], weight.shape[0])
    products.multiply([products.pack(kind, weight)], x, [out])
    return out


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_product_equals_its_reference(products: Products, kind: Kind, shape: tuple[int, int, int]) -> None:
    outputs, inputs, rows = shape
    weight, x = random(outputs, inputs), random(rows, inputs, seed=1)
    found, expected = multiply(products, kind, x, weight), expected_product(kind, x, weight)
    if kind is Kind.INT8:
        assert torch.equal(found, expected)
    # Sums of float32 in order: each addition rounds once, and no partial sum exceeds that of the magnitudes.
    bound = (inputs + 2) * 2**-24 * (x.abs() @ magnitudes(kind, weight).T) * 1.1
    assert ((found - expected).abs() <= bound).all()


@kinds
def test_row_does_not_depend_on_its_neighbours(products: Products, kind: Kind) -> None:
    weight, x = random(70, 150), random(200, 150, seed=1)
    whole = multiply(products, kind, x, weight)
    for count in (1, 2, 5, 6, 12, 13, 41, 77):
        assert torch.equal(multiply(products, kind, x[:count], weight), whole[:count])
    assert torch.equal(multiply(products, kind, x[150:151], weight), whole[150:151])


@kinds
@pytest.mark.parametrize("activation", range(4))
def test_gated_layer(products: Products, kind: Kind, activation: int) -> None:
    gates, ups, bias, x = random(41, 50), random(41, 50, seed=1), random(82), random(9, 50, seed=2)
    out = torch.zeros(9, 41)
    layer = products.pack(kind, gates, ups, bias)
    products.multiply([layer], x, [out], way=Way.GATE, activation=activation)
    gate, up = expected_product(kind, x, gates) + bias[:41], expected_product(kind, x, ups) + bias[41:]
    torch.testing.assert_close(out, ACTIVATIONS[activation](gate) * up, rtol=1e-4, atol=1e-4)


@kinds
def test_result_is_added_and_nothing_else_is_touched(products: Products, kind: Kind) -> None:
    weight, bias, x = random(37, 20), random(37), random(6, 20, seed=1)
    around = torch.full((8, 50), 3.0)
    products.multiply(
        [products.pack(kind, weight, bias=bias)], x, [around[1:7, :37]], way=Way.ADD, factor=0.5
    )
    expected = torch.full((8, 50), 3.0)
    expected[1:7, :37] += 0.5 * (expected_product(kind, x, weight) + bias)
    torch.testing.assert_close(around, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(around[:, 37:], expected[:, 37:])
    assert torch.equal(around[[0, 7]], expected[[0, 7]])


@kinds
def test_no_rows(products: Products, kind: Kind) -> None:
    assert multiply(products, kind, torch.zeros(0, 20), random(5, 20)).shape == (0, 5)


@kinds
def test_what_is_no_number_stays_none_and_harms_no_other(products: Products, kind: Kind) -> None:
    weight, x = random(40, 70), random(6, 70, seed=1)
    clean = multiply(products, kind, x, weight)
    for strange in (torch.nan, torch.inf):
        bad_x, bad_weight = x.clone(), weight.clone()
        bad_x[2, 69], bad_weight[33, 3] = strange, strange
        found = multiply(products, kind, bad_x, bad_weight)
        assert not found[2].isfinite().any()
        assert not found[:, 33].isfinite().any()
        rows, outputs = [0, 1, 3, 4, 5], [*range(33), *range(34, 40)]
        assert torch.equal(found[rows][:, outputs], clean[rows][:, outputs])


@kinds
def test_zeros(products: Products, kind: Kind) -> None:
    assert not multiply(products, kind, torch.zeros(3, 40), random(9, 40)).any()
    assert not multiply(products, kind, random(3, 40), torch.zeros(9, 40)).any()


@pytest.mark.parametrize(("kind", "limit"), [(Kind.INT8, 0.02), (Kind.INT4, 0.10)])
def test_error_of_a_gaussian_layer(products: Products, kind: Kind, limit: float) -> None:
    weight, x = random(512, 1024), random(32, 1024, seed=1)
    exact = x.double() @ weight.double().T
    assert (multiply(products, kind, x, weight) - exact).norm() < limit * exact.norm()


def test_weight_that_was_in_4_bits_with_a_minimum_is_found_again(products: Products) -> None:
    grid = torch.randint(0, 16, (64, 8, 32), generator=torch.Generator().manual_seed(0)).float()
    weight = (grid * random(64, 8, 1).abs() + random(64, 8, 1, seed=1)).flatten(1)
    x = random(16, 256, seed=2)
    exact = x.bfloat16().double() @ weight.double().T
    # But for scales and offsets that are brain floats here.
    assert (multiply(products, Kind.INT4, x, weight) - exact).norm() < 0.004 * exact.norm()


@kinds
def test_weight_packed_in_parts_is_the_same(products: Products, kind: Kind) -> None:
    weight = random(160, 40)
    whole = products.pack(kind, weight)
    parts = [products.pack(kind, part) for part in (weight[:64], weight[64:])]
    assert torch.equal(whole.panels, torch.cat([part.panels for part in parts]))
    assert torch.equal(whole.scales, torch.cat([part.scales for part in parts]))


def test_rows_are_quantized_as_in_the_reference(products: Products) -> None:
    x = random(5, 77) * torch.tensor([[1e-20], [1.0], [1e6], [0.0], [3.0]])
    layer = products.pack(Kind.INT8, random(4, 77))
    (scales,) = products.multiply([layer], x, [torch.zeros(5, 4)]).scales
    assert torch.equal(scales, reference.quantize_rows(x).scales)
