"""Test that the NumPy arithmetic for bfloat16, float16 and e4m3 gives the same bits as torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.codecs.holding import decoded, encoded, spec_of, words_of
from tierstore.codecs import LOSSY, quantization
from tierstore.page import PageLayout


def narrowed(numbers: NDArray[np.float32], dtype: str) -> NDArray[np.generic]:
    words = np.empty(numbers.shape, dtype=quantization.WORDS[dtype])
    quantization.narrow(numbers.copy(), words, np.empty_like(numbers))
    return words


def finite_float32() -> NDArray[np.float32]:
    """Return float32 numbers of every exponent, including ties in bfloat16 and float16 and numbers next to ties."""
    chance = np.random.default_rng(0)
    bits = chance.integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    ties = chance.integers(0, 1 << 16, 1 << 14, dtype=np.uint32) << 16
    near = [ties + 0x8000, ties + 0x7FFF, ties + 0x8001, ties, (ties & 0xFFFFE000) + 0x1000]
    numbers = np.concatenate([bits, *near]).view(np.float32)
    largest = np.float32(3.3895e38)
    return numbers[np.abs(numbers) < largest]


def test_rounding_to_bfloat16_is_that_of_torch() -> None:
    numbers = finite_float32()
    wanted = torch.from_numpy(numbers).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    np.testing.assert_array_equal(narrowed(numbers, "bfloat16"), wanted)


def test_rounding_to_float16_equals_torch_except_overflow() -> None:
    numbers = finite_float32()
    wanted = torch.from_numpy(numbers).clamp(-65504, 65504).to(torch.float16).numpy()
    np.testing.assert_array_equal(narrowed(numbers, "float16"), wanted)


def test_every_bfloat16_has_its_value() -> None:
    words = np.arange(1 << 16, dtype="<u2")
    numbers = np.empty(words.shape, dtype=np.float32)
    quantization.widen(words, numbers)
    wanted = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(numbers.view(np.uint32), wanted.view(np.uint32))


def test_stored_scales_are_the_nearest_or_never_smaller_and_at_most_a_128th_larger() -> None:
    scales = np.abs(finite_float32())
    scales = scales[(scales < 2.0**126) & (scales >= 2.0**-126)]
    values = quantization.scale_values(quantization.rounded_up(scales))
    assert (values >= scales).all()
    assert (values.astype(np.float64) <= scales.astype(np.float64) * (1 + 2.0**-7)).all()
    nearest = quantization.scale_values(quantization.rounded(scales)).astype(np.float64)
    wanted = torch.from_numpy(scales).bfloat16().double().numpy()
    np.testing.assert_array_equal(nearest, wanted)
    powers = quantization.scale_values(quantization.power_of_two(scales))
    assert (np.frexp(powers)[0] == 0.5).all()
    assert ((powers >= scales) & (powers.astype(np.float64) < 2 * scales.astype(np.float64))).all()
    zero = np.zeros(1, dtype=np.float32)
    assert quantization.rounded_up(zero) == quantization.rounded(zero) == quantization.power_of_two(zero) == 0
    subnormal = np.array([1e-45, 1e-39], dtype=np.float32)
    assert (quantization.scale_values(quantization.rounded_up(subnormal)) == 2.0**-126).all()
    assert (quantization.scale_values(quantization.rounded(subnormal)) == 2.0**-126).all()


def fp8_page(numbers: NDArray[np.float32], dtype: str, scale: float) -> tuple[PageLayout, NDArray[np.uint8]]:
    """Return a page with one layer, whose K consists of 448 * ``scale`` and ``numbers``.

    Because of the number 448 * ``scale``, the codec stores exactly ``scale`` as the scale.
    """
    numbers = np.concatenate([np.full(1, 448 * scale, dtype=np.float32), numbers])
    spec = spec_of(dtype, 1, 1, 1, numbers.size)
    return PageLayout.of(spec), words_of(np.concatenate([numbers, np.zeros_like(numbers)]), dtype)


@pytest.mark.parametrize("scale", [1.0, 0.25, 16.0])
def test_codes_of_fp8_equal_those_of_torch(scale: float) -> None:
    words = np.arange(1 << 16, dtype=np.uint32) << 16
    every = words.view(np.float32)[np.abs(words.view(np.float32)) <= 448 * scale]
    chance = np.random.default_rng(0)
    ties = np.repeat(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy(), 2)
    middles = ((ties[1:] + ties[:-1]) / 2 * scale).astype(np.float32)[:-1]  # all below 448
    fine = (np.exp2(chance.uniform(-14, 8.8, 1 << 16)) * scale).astype(np.float32)
    for dtype, numbers in (
        ("bfloat16", every),
        ("float32", np.concatenate([middles, -middles, fine, -fine])),
        ("float32", np.nextafter(middles, np.float32(0))),
        ("float32", np.nextafter(middles, np.float32(500 * scale))),
    ):
        layout, page = fp8_page(numbers, dtype, scale)
        payload = encoded(LOSSY["fp8"], layout, page)
        assert payload is not None
        assert quantization.scale_values(payload[:2].view("<u2")) == scale
        codes = payload[4 : 4 + 1 + numbers.size][1:]
        wanted = (torch.from_numpy(numbers) / scale).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
        np.testing.assert_array_equal(codes, wanted)


def test_every_code_of_fp8_has_the_value_torch_gives_it() -> None:
    codes = np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF])
    spec = spec_of("float32", 1, 1, 1, codes.size)
    scale = quantization.power_of_two(np.array([8.0, 1.0], dtype=np.float32))
    payload = np.concatenate([scale.view(np.uint8), codes, codes])
    page = decoded(LOSSY["fp8"], PageLayout.of(spec), payload).view("<f4").reshape(2, -1)
    wanted = torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(page, np.stack([8 * wanted, wanted]))
