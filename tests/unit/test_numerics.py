"""The shared bit-level arithmetic: golden values of the specification and special codes."""

from __future__ import annotations

import importlib.util
import math
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from dspark_trt.builder.config import Numerics, parse_configs
from dspark_trt.builder.model.context import BuildContext
from dspark_trt.builder.model.draft import Stage
from dspark_trt.plugins import numerics
from dspark_trt.plugins.attention import sink_attention
from dspark_trt.plugins.mhc_coefficients import MHC_COEFFICIENTS
from torch import Tensor

from tests.oracle import numpy_ops as ops
from tests.released import tiny_config


def bytes_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(torch.int8)


ALL_BYTES = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(torch.int8)

# Golden values (spec 8.1) -------------------------------------------------------------------------------


@pytest.mark.parametrize(("amax", "scale"), [(448, 1), (449, 2), (224, 0.5), (300, 1), (1e-4, 2.0**-22), (3, 2.0**-7)])
def test_scale_is_the_next_power_of_two(amax: float, scale: float) -> None:
    _, found = numerics.act_quant(torch.tensor([[amax] + [0.0] * 31]), 32)
    assert found.tolist() == [[scale]]


def test_scale_has_a_floor_for_empty_groups() -> None:
    """Zeros: amax is taken as 1e-4, not as a division by zero."""
    codes, scale = numerics.act_quant(torch.zeros(1, 32), 32)
    assert scale.item() == 2.0**-22
    assert not codes.any()


def test_group_of_codes() -> None:
    x = torch.tensor([[3.0, 0.01, -1.0, 0.3] + [0.0] * 28], dtype=torch.bfloat16)
    codes, scale = numerics.act_quant(x, 32)
    assert scale.item() == 2.0**-7
    assert codes[0, :4].tolist() == [384, 1.25, -128, 40]
    assert numerics.act_quant_dequant(x, 32)[0, :4].tolist() == [3.0, 0.009765625, -1.0, 0.3125]


@pytest.mark.parametrize("group", [32, 64, 128])
def test_act_quant_equals_the_oracle(group: int) -> None:
    """Codes and scales of values over thirty binades, bf16, for every group size in use."""
    generator = torch.Generator().manual_seed(group)
    magnitude = torch.exp2(30 * torch.rand(200, 1, generator=generator) - 15)
    x = (torch.randn(200, 256, generator=generator) * magnitude).bfloat16()
    codes, scale = numerics.act_quant(x, group)
    wanted_codes, wanted_scale = ops.act_quant(x.double().numpy(), group)
    assert (scale.numpy() == wanted_scale).all()
    assert (codes.numpy() == wanted_codes).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_act_quant_dequant_is_idempotent(dtype: torch.dtype) -> None:
    x = (torch.randn(500, 128, generator=torch.Generator().manual_seed(0)) * 37).to(dtype)
    once = numerics.act_quant_dequant(x, 32)
    assert not torch.equal(once, x)
    assert torch.equal(numerics.act_quant_dequant(once, 32), once)


def test_saturation_never_makes_nan() -> None:
    """A value that the scale's rounding leaves above 448 saturates; e4m3 has no infinity to fall into."""
    x = torch.tensor([[448.0 * 2.0**-20 * (1 + 2**-7)] * 32]).bfloat16()
    assert numerics.act_quant_dequant(x, 32).isfinite().all()


def released_format() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "_released_format.py"
    spec = importlib.util.spec_from_file_location("_released_format", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_fp4_rounds_ties_to_even() -> None:
    """The quantiser that made the tiny checkpoint."""
    values = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, -0.75])
    assert released_format().round_fp4(values).tolist() == [0, 1, 1, 2, 2, 4, 4, 6, -1]


def test_fp4_nibbles_low_first() -> None:
    """CK-7."""
    assert numerics.decode_fp4(bytes_of(0x21, 0xF7)).tolist() == [0.5, 1.0, 6.0, -6.0]


def test_one_key_of_score_zero_weighs_against_the_sink() -> None:
    """Weight 1 / (1 + e^sink); a sink multiplied by the softmax scale would be far outside the bound."""
    sink, dim = torch.tensor([2.0, 2.5, 3.0, -1.0]), 512
    keys = torch.ones(1, 133, dim, dtype=torch.bfloat16)
    valid = torch.zeros(1, 133, dtype=torch.bool)
    valid[0, 77] = True
    found = sink_attention(torch.zeros(1, 4, dim, dtype=torch.bfloat16), keys, valid, sink)[0, :, 0].double()
    wanted = 1 / (1 + sink.double().exp())
    scaled = 1 / (1 + (sink * dim**-0.5).double().exp())
    assert ((found - wanted).abs() <= wanted * 2**-8).all()  # one rounding to bf16
    assert ((scaled - wanted).abs() > 8.5e-3).all()


def test_no_key_gives_exact_zeros() -> None:
    keys = torch.full((1, 70, 64), torch.inf)
    out = sink_attention(torch.randn(1, 2, 64), keys.nan_to_num(0, 0, 0), torch.zeros(1, 70).bool(), torch.zeros(2))
    assert torch.equal(out, torch.zeros(1, 2, 64))


def coefficients(base: Tensor, *, hc_eps: float, iterations: int = 20) -> tuple[Tensor, ...]:
    """pre, post, comb of one row whose logits are ``base`` alone."""
    return MHC_COEFFICIENTS(
        torch.ones(1, 4, 8),
        torch.zeros(24, 32),
        torch.ones(3),
        base,
        rms_eps=1e-6,
        hc_eps=hc_eps,
        sinkhorn_iters=iterations,
    )


def test_sinkhorn_of_two_by_two() -> None:
    """[[0, ln 3], [ln 3, 0]] -> [[1/4, 3/4], [3/4, 1/4]], as blocks of the four streams."""
    far, three = -1e4, math.log(3)
    logits = torch.tensor([[0, three, far, far], [three, 0, far, far], [far, far, 0, three], [far, far, three, 0]])
    pre, post, comb = coefficients(torch.cat((torch.zeros(8), logits.flatten())), hc_eps=0.0)
    block = torch.tensor([[0.25, 0.75], [0.75, 0.25]])
    assert torch.allclose(comb[0], torch.block_diag(block, block), atol=1e-7)
    assert pre.tolist() == [[0.5] * 4] and post.tolist() == [[1.0] * 4]


def test_sinkhorn_ends_on_the_columns() -> None:
    """Column sums 1 within 1e-5 however peaked the logits are; row sums drift, which is not a fault."""
    drift = 0.0
    for seed in range(50):
        base = 8 * torch.randn(24, generator=torch.Generator().manual_seed(seed))
        comb = coefficients(base, hc_eps=1e-6)[2][0]
        assert (comb.sum(0) - 1).abs().max() < 1e-5
        drift = max(drift, float((comb.sum(1) - 1).abs().max()))
    assert drift > 1e-2


# Matrix products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [32, 128])
def test_fp8_product_is_within_one_bf16_ulp_of_float64(block: int) -> None:
    """And at least 99 % of it has the same bits (spec 8.1)."""
    generator = torch.Generator().manual_seed(block)
    x = torch.randn(40, 1024, generator=generator).bfloat16()
    weight = (16 * torch.randn(256, 1024, generator=generator)).to(torch.float8_e4m3fn).float()
    scale = torch.exp2(torch.randint(-9, -5, (256, 1024 // block), generator=generator).float())
    found = numerics.quantized_matmul(x, weight, scale, group=block, block=block).bfloat16().double().numpy()
    dequantized = weight.double().numpy() * np.repeat(scale.double().numpy(), block, 1)
    wanted = ops.BF16(ops.act_quant_dequant(x.double().numpy(), block) @ dequantized.T)
    ulp = np.ldexp(1.0, np.frexp(np.abs(wanted))[1] - 8)
    assert (np.abs(found - wanted) <= ulp).all()
    assert (found == wanted).mean() >= 0.99


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_row_of_a_product_does_not_depend_on_its_batch(name: str, dtype: torch.dtype) -> None:
    """HC-7: a row alone and in batches of 1..40, bit for bit."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 1000, generator=generator).to(dtype)
    weight = torch.randn(130, 1000, generator=generator).to(dtype)
    product = getattr(numerics, name)
    whole = product(x, weight)
    assert whole.dtype == (torch.float32 if name == "matmul" else dtype)
    for count in range(1, 41):
        assert torch.equal(product(x[:count], weight), whole[:count])
        assert torch.equal(product(x[count - 1 : count], weight), whole[count - 1 : count])


@pytest.mark.parametrize("name", ["matmul", "linear"])
def test_float16_products_are_summed_wide(name: str) -> None:
    """SMP-12: single channels of 2e4 in a product as wide as three captured rows. Partial sums go far beyond
    float16's 65504 and come back; the result, the small channels' 0.5 among it, is exact."""
    x, weight = torch.zeros(2, 15360, dtype=torch.float16), torch.ones(3, 15360, dtype=torch.float16)
    x[:, 0:5120:512], x[:, 5120:10240:512] = 2e4, -2e4
    x[:, 10240:10256] = 2.0**-5
    weight[1:] = -1
    found = getattr(numerics, name)(x, weight)
    assert found.tolist() == [[0.5, -0.5, -0.5]] * 2


def test_projected_features_are_not_stored_in_float16() -> None:
    """SMP-12: the projection passes float16's range where single channels are large; what stages attend to is finite,
    and what float32 gives, rounded."""
    _, config = parse_configs(tiny_config("v4.1"))
    stages = []
    for dtype in (torch.float16, torch.float32):
        stage = Stage(0, config, BuildContext(Numerics.DEQUANTIZED, dtype))
        with torch.no_grad():
            stage.main_proj.weight.fill_(0.5)
            stage.main_norm.weight.fill_(1)
        stages.append(stage)
    features = torch.zeros(2, config.num_features * config.hidden_size)
    features[:, ::64] = 2e4
    half, wide = stages[0].main_x(features.half()), stages[1].main_x(features)
    assert stages[0].main_proj(features.half()).isinf().all(), "the example does not pass float16's range"
    assert half.dtype == torch.float16 and torch.equal(half, wide.half())


def test_row_of_a_quantised_product_does_not_depend_on_its_batch() -> None:
    """HC-7: float32 activations included, codes are exact in any case."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(40, 512, generator=generator)
    weight = (16 * torch.randn(70, 512, generator=generator)).to(torch.float8_e4m3fn).float()
    scale = torch.exp2(torch.randint(-9, -5, (70, 16), generator=generator).float())
    product = partial(numerics.quantized_matmul, weight=weight, weight_scale=scale, group=32, block=32)
    whole = product(x)
    for count in range(1, 41):
        assert torch.equal(product(x[:count]), whole[:count])
        assert torch.equal(product(x[count - 1 : count]), whole[count - 1 : count])


def test_float32_product_stays_within_its_documented_precision() -> None:
    """HC-7: float32 operands are summed in float32; rows of a batch may differ by rounding, no more."""
    generator = torch.Generator().manual_seed(3)
    x, weight = torch.randn(40, 1000, generator=generator), torch.randn(130, 1000, generator=generator)
    exact = x.double() @ weight.double().T
    for rows in (x, x[:1], x[:7]):
        # 1000 products of size one: 1000 roundings of 2^-24 of partial sums around 30.
        assert (numerics.matmul(rows, weight) - exact[: len(rows)]).abs().max() < 2e-4


# Norms and formats --------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [1e-6, 1e-20])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e4])
def test_rms_norm_equals_the_oracle(eps: float, scale: float) -> None:
    """One rounding, eps inside the root: 1e-6 swallows rows of 1e-9, 1e-20 does not."""
    generator = torch.Generator().manual_seed(4)
    x = (scale * torch.randn(30, 96, generator=generator)).bfloat16()
    weight = torch.randn(96, generator=generator).bfloat16()
    found = numerics.rms_norm(x, weight, eps).double().numpy()
    exact = ops.rms_norm(x.double().numpy(), weight.double().numpy(), eps)
    assert (np.abs(found - exact) <= np.abs(exact) * 2**-8 + 1e-38).all()
    assert (found == ops.BF16(exact)).mean() > 0.99


def test_e8m0_special_bytes() -> None:
    """CK-6: byte 0 is 2^-127 (a float32 denormal), 255 is NaN."""
    found = numerics.decode_e8m0(bytes_of(0, 1, 127, 254, 255)).double()
    assert found[:4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert found[4].isnan()


def test_every_byte_of_every_format() -> None:
    for decode, wanted in (
        (numerics.decode_e8m0, ops.decode_e8m0(ALL_BYTES.numpy())),
        (numerics.decode_e4m3, ops.decode_e4m3(ALL_BYTES.numpy())),
        (numerics.decode_fp4, ops.decode_fp4(ALL_BYTES.numpy())),
    ):
        assert np.array_equal(decode(ALL_BYTES).double().numpy(), wanted, equal_nan=True)


def test_block_scales_spread_over_their_block_alone() -> None:
    """CK-5: one block differs, the last blocks are partial."""
    scale = torch.ones(3, 2)
    scale[1, 1] = 8.0
    wide = numerics.expand_block_scale(scale, (32, 32), (70, 40))
    assert wide.shape == (70, 40)
    assert (wide[32:64, 32:] == 8).all() and wide.sum() == 70 * 40 + 7 * 32 * 8


# RoPE ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("position", "apart"), [(65_536, 5e-4), (1_000_003, 2e-2)])
def test_rope_angles_are_float32_products(position: int, apart: float) -> None:
    """Spec 10.6: float64 angles would be another model, further than this away for 64 rotated channels."""
    cos, sin = numerics.rope_tables(torch.tensor([position], dtype=torch.int32), 64, 1e4)
    angle = ops.rope_angles(np.array([position]), 64, 1e4)
    assert np.abs(cos.numpy() - np.cos(angle)).max() < 2e-7
    assert np.abs(sin.numpy() - np.sin(angle)).max() < 2e-7
    exact = position * 1e4 ** -(np.arange(0, 64, 2) / 64)
    assert apart < np.abs(angle - exact).max() < 3 * apart


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_adjacent_pairs_of_the_last_channels(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(9, 3, 40, generator=generator).to(dtype)
    positions = torch.tensor([0, 1, 2, 126, 127, 128, 12000, 2**20 - 6, 2**20 - 1], dtype=torch.int32)
    cos, sin = numerics.rope_tables(positions, 16, 1e4)
    found = numerics.apply_rope(x, cos[:, None], sin[:, None])
    wanted = ops.rope(x.double().numpy(), positions.numpy(), 16, 1e4)
    assert torch.equal(found[..., :24], x[..., :24])
    assert torch.equal(found[0], x[0])
    tolerance = 1e-6 if dtype == torch.float32 else 2**-8 * 4
    assert np.abs(found.double().numpy() - wanted).max() < tolerance


def test_inverse_rope_undoes_rope() -> None:
    x = torch.randn(50, 32, generator=torch.Generator().manual_seed(6))
    cos, sin = numerics.rope_tables(torch.arange(0, 50000, 1000, dtype=torch.int32), 32, 1e4)
    turned = numerics.apply_rope(x, cos, sin)
    assert (turned - x)[1:].abs().max() > 0.1
    assert (numerics.apply_rope(turned, cos, sin, inverse=True) - x).abs().max() < 2e-6


# Argmax -------------------------------------------------------------------------------------------------

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("row", "winner"),
    [
        ([NAN] * 5, 0),
        ([1.0, NAN, 3.0, 2.0], 2),
        ([NAN, 1.0, 2.0, 0.0], 2),
        ([0.0, 1.0, 2.0, NAN], 2),
        ([-INF] * 4, 0),
        ([INF] * 4, 0),
        ([NAN, -INF, -INF], 0),
        ([-INF, NAN, -1e30], 2),
        ([NAN, INF, 3.0, INF], 1),
        ([0.0, -0.0], 0),
        ([-0.0, 0.0], 0),
        ([5.0], 0),
        ([NAN], 0),
    ],
)
def test_argmax_of_special_rows(row: list[float], winner: int) -> None:
    """SMP-5: always an id of the row, by one rule; NaN counts as -inf."""
    found = numerics.first_argmax(torch.tensor([row, row]))
    assert found.dtype == torch.int32
    assert found.tolist() == [winner, winner]


@pytest.mark.parametrize("size", [1, 2, 2047, 2048, 2049, 129280])
def test_argmax_takes_the_lowest_of_equals(size: int) -> None:
    """SMP-6: constant rows, ties over any block border, a winner at V - 1."""
    rows = torch.zeros(3, size)
    rows[1, size - 1] = 1.0
    rows[2, [size // 2, size - 1]] = 1.0
    assert numerics.first_argmax(rows).tolist() == [0, size - 1, size // 2]
    random = torch.randint(0, 50, (20, size), generator=torch.Generator().manual_seed(size)).float()
    assert np.array_equal(numerics.first_argmax(random).numpy(), random.numpy().argmax(-1))
