"""The arithmetic of the codecs on numbers in a card's registers: jit functions that the coding kernels are made of.

Number by number the same float32 arithmetic as ``tierstore.codecs``, rounded as NumPy rounds.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BFLOAT16 = tl.constexpr(0)
FLOAT16 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)
SIGNED = tl.constexpr(0)
FLOORED = tl.constexpr(1)
FP8 = tl.constexpr(2)

# 1.5 * 2**23: what is added to it is rounded to a whole number, ties to even.
_ROUND = tl.constexpr(12582912.0)
_SMALLEST = tl.constexpr(2.0**-126)
_LEAST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def place_of(
    i,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, NUMBER: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """How far number i of ``[tokens, heads, dim]`` lies after the first; ``PLAIN``: they lie in a row."""
    at = i
    if not PLAIN:
        far = i.to(tl.int64)
        at = far // (HEADS * DIM) * TOKEN + far // DIM % HEADS * HEAD + far % DIM * NUMBER
    return at


@triton.jit
def side_of(i, LENGTH: tl.constexpr, MEMBERS: tl.constexpr, CHANNELS: tl.constexpr):
    """Which scale number i has."""
    if CHANNELS:
        side = i // (MEMBERS * CHANNELS) * CHANNELS + i % CHANNELS
    else:
        side = i // LENGTH * ((LENGTH + MEMBERS - 1) // MEMBERS) + i % LENGTH // MEMBERS
    return side


@triton.jit
def larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def smaller(a, b):
    return tl.minimum(a, b)


@triton.jit
def widened(raw, DTYPE: tl.constexpr):
    x = raw
    if DTYPE == BFLOAT16:
        x = (raw.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif DTYPE == FLOAT16:
        x = raw.to(tl.float32)
    return x


@triton.jit
def narrowed(x, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    """As words of the page; nothing becomes infinite."""
    if DTYPE == BFLOAT16:
        bits = x.to(tl.uint32, bitcast=True)
        raw = ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).to(tl.uint16).to(tl.int16, bitcast=True)
    elif DTYPE == FLOAT16:
        raw = tl.minimum(tl.maximum(x, -LARGEST), LARGEST).to(tl.float16)
    else:
        raw = x
    return raw


@triton.jit
def rounded(scale, UP: tl.constexpr):
    """A scale as bfloat16's bits: the nearest, or ``UP`` to the next that is not smaller."""
    bits = tl.where(scale > 0, tl.maximum(scale, _SMALLEST), 0.0).to(tl.uint32, bitcast=True)
    if UP:
        bits += 0xFFFF
    else:
        bits += 0x7FFF + ((bits >> 16) & 1)
    return bits >> 16


@triton.jit
def power_of_two(scale):
    """A scale as the bits of the next power of two that is not smaller."""
    bits = tl.where(scale > 0, tl.maximum(scale, _SMALLEST), 0.0).to(tl.uint32, bitcast=True)
    return ((bits + 0x7FFFFF) >> 23) << 7


@triton.jit
def scale_value(stored):
    return (stored << 16).to(tl.float32, bitcast=True)


@triton.jit
def reciprocal_of(scale):
    return tl.where(scale > 0, tl.div_rn(1.0, tl.where(scale > 0, scale, 1.0)), 0.0)


@triton.jit
def _whole(y):
    """The nearest whole number's low byte, ties to even; of a negative one its two's complement."""
    return (y + _ROUND).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def code_of(x, floor, reciprocal, RULE: tl.constexpr):
    if RULE == FP8:
        sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
        y = tl.abs(x) * reciprocal
        normal = tl.maximum(y, _LEAST_NORMAL).to(tl.int32, bitcast=True)
        normal = (normal + ((normal >> 20) & 1) + 0x7FFFF) >> 20
        code = ((normal + _whole(tl.minimum(y, _LEAST_NORMAL) * 512.0) - 968) & 0xFF) | sign
    elif RULE == FLOORED:
        code = _whole((x - floor) * reciprocal)
    else:
        code = _whole(x * reciprocal)
    return code


@triton.jit
def value_of(code, RULE: tl.constexpr):
    """The number of a code as float32, before the scale. ``code``: int32 of 0 to 255."""
    if RULE == FP8:
        exponent, mantissa = (code >> 3) & 15, code & 7
        normal = ((exponent + 120) << 23) | (mantissa << 20)
        subnormal = (mantissa.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        # The sign by its bit: Triton's minus is a subtraction from 0, which makes no -0.
        bits = tl.where(exponent > 0, normal, subnormal) | ((code & 0x80) << 24)
        x = bits.to(tl.float32, bitcast=True)
    elif RULE == FLOORED:
        x = code.to(tl.float32)
    else:
        x = tl.where(code >= 0x80, code - 256, code).to(tl.float32)
    return x


@triton.jit
def store_floor(halves, at, floor, mask, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    if DTYPE == FLOAT32:  # two halves, as its place may be no multiple of four
        bits = floor.to(tl.uint32, bitcast=True)
        tl.store(halves + at * 2, (bits & 0xFFFF).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
        tl.store(halves + at * 2 + 1, (bits >> 16).to(tl.uint16).to(tl.int16, bitcast=True), mask=mask)
    else:
        raw = narrowed(floor, DTYPE, LARGEST)
        tl.store(halves + at, raw.to(tl.int16, bitcast=True), mask=mask)


@triton.jit
def load_floor(halves, at, mask, DTYPE: tl.constexpr):
    if DTYPE == FLOAT32:
        low = tl.load(halves + at * 2, mask=mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = tl.load(halves + at * 2 + 1, mask=mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
        floor = ((high << 16) | low).to(tl.float32, bitcast=True)
    elif DTYPE == FLOAT16:
        floor = tl.load(halves + at, mask=mask, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        floor = widened(tl.load(halves + at, mask=mask, other=0), DTYPE)
    return floor


@triton.jit
def load_scale(halves, at, mask):
    return tl.load(halves + at, mask=mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
