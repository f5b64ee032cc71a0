"""States that lost precision are told from those that use their dtype's."""

import pytest
import torch

from tasks.precision import lost_precision

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
WIDTHS = [32, 64, 576, 7168]


def states(hidden: int) -> torch.Tensor:
    """Rows of different sizes, a few values a thousand times the others, as residual streams have them."""
    generator = torch.Generator().manual_seed(hidden)
    values = torch.randn(100, hidden, generator=generator) * (0.1 + torch.rand(100, 1, generator=generator))
    values[:, 3] *= 1000
    return values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_states_as_a_model_computes_them_have_lost_nothing(dtype: torch.dtype, hidden: int) -> None:
    assert lost_precision(states(hidden).to(dtype)) is None


def test_bfloat16_rounded_twice_has_lost_nothing() -> None:
    assert lost_precision((states(64).bfloat16().float() * 1.1).bfloat16()) is None


@pytest.mark.parametrize("scaled", [False, True], ids=["as it is", "a scale for each row"])
@pytest.mark.parametrize("fp8", FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("hidden", WIDTHS)
def test_fp8_is_recognized_in_every_dtype(dtype: torch.dtype, fp8: torch.dtype, hidden: int, scaled: bool) -> None:
    values = states(hidden)
    values[:, 3] /= 1000  # what overflows or vanishes in fp8 is another damage
    scale = values.abs().amax(-1, keepdim=True) / 300 if scaled else torch.tensor(1.0)
    rounded = ((values / scale).to(fp8).float() * scale).to(dtype)
    assert "different mantissas, as fp8 has" in str(lost_precision(rounded))


def test_fp8_with_a_scale_for_each_128_values_is_recognized() -> None:
    values = states(7168).unflatten(-1, (-1, 128))
    scale = values.abs().amax(-1, keepdim=True) / 400
    rounded = ((values / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)
    assert "as fp8 has" in str(lost_precision(rounded.bfloat16()))


@pytest.mark.parametrize(
    ("dtype", "through", "named"),
    [
        (torch.float32, torch.bfloat16, "every value is a bfloat16 number, although the state is float32"),
        (torch.float32, torch.float16, "every value is a float16 number, although the state is float32"),
        (torch.float16, torch.bfloat16, "every value is a bfloat16 number, although the state is float16"),
    ],
)
def test_a_state_that_passed_through_a_shorter_format_is_named(
    dtype: torch.dtype, through: torch.dtype, named: str
) -> None:
    assert lost_precision(states(64).clamp(-100, 100).to(through).to(dtype)) == named
