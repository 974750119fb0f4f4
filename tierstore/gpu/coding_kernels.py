"""Triton kernels of the codecs with payloads of one length: pages in device memory to payloads there, and back.

They make the bytes that ``tierstore.codecs`` makes; launch them with ``enable_fp_fusion=False``, for NumPy rounds every
product before it adds.

A program has one page of those given, one layer and plane of it, and some of its numbers. Number i of ``[tokens, heads,
dim]`` lies ``place_of(i)`` numbers after the plane's first, which is ``slot * SLOT + deltas[layer] + plane * PLANE``
after ``words``. A payload starts every ``PAYLOAD`` bytes of ``halves`` and ``codes``, which are the same memory.
"""

# mypy: ignore-errors

from __future__ import annotations

from subprocess import CalledProcessError

import triton
import triton.language as tl

from tierstore.gpu.coding_numbers import (
    FLOORED,
    FP8,
    code_of,
    larger,
    load_floor,
    load_scale,
    narrowed,
    place_of,
    power_of_two,
    reciprocal_of,
    rounded,
    scale_value,
    side_of,
    smaller,
    store_floor,
    value_of,
    widened,
)

REFUSALS = (triton.TritonError, CalledProcessError, OSError, RuntimeError)
"""What Triton raises where it cannot compile: for a card it does not know, or without a compiler of C."""

_FINITE = tl.constexpr(0x7FFFFFFF)


@triton.jit(do_not_specialize=["first"])
def measure(
    words, deltas, slots, halves, codes, flags, first,
    SLOT: tl.constexpr, PLANES: tl.constexpr, PLANE: tl.constexpr, TOKEN: tl.constexpr,
    HEAD: tl.constexpr, NUMBER: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PLAIN: tl.constexpr, ALIGNED: tl.constexpr, PAYLOAD: tl.constexpr, SCALES: tl.constexpr,
    FLOORS: tl.constexpr, SIDES_NEXT: tl.constexpr, CODES: tl.constexpr, CODES_NEXT: tl.constexpr,
    LAYER_CODES: tl.constexpr, NUMBERS: tl.constexpr, SIDES: tl.constexpr, LENGTH: tl.constexpr,
    MEMBERS: tl.constexpr, CHANNELS: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr,
    LIMIT: tl.constexpr, MOST: tl.constexpr, UP: tl.constexpr, RULE: tl.constexpr, BITS: tl.constexpr,
    SIDE_BLOCK: tl.constexpr, MEMBER_BLOCK: tl.constexpr,
):  # fmt: skip
    """Scales and floors of ``SIDE_BLOCK`` groups of numbers, and their codes where these are bytes.

    ``flags[first + page]`` becomes 1 where a number is none, or too large.
    """
    page, layer = tl.program_id(0), tl.program_id(1) // PLANES
    plane = (tl.program_id(1) % PLANES).to(tl.int64)
    delta = tl.multiple_of(tl.load(deltas + layer), ALIGNED)
    words += tl.load(slots + first + page) * SLOT + delta + plane * PLANE
    payload = page.to(tl.int64) * PAYLOAD
    scales = halves + (payload + SCALES + plane * SIDES_NEXT) // 2
    floors = halves + (payload + FLOORS + plane * SIDES_NEXT) // 2
    codes += payload + CODES + plane * CODES_NEXT + layer * LAYER_CODES

    side = tl.program_id(2) * SIDE_BLOCK + tl.arange(0, SIDE_BLOCK)
    if CHANNELS:
        start = side // CHANNELS * (MEMBERS * CHANNELS) + side % CHANNELS
        count = tl.minimum(LENGTH - side // CHANNELS * MEMBERS, MEMBERS)
        step = CHANNELS
    else:
        groups = (LENGTH + MEMBERS - 1) // MEMBERS
        start = side // groups * LENGTH + side % groups * MEMBERS
        count = tl.minimum(LENGTH - side % groups * MEMBERS, MEMBERS)
        step = 1
    count = tl.where(side < SIDES, count, 0)

    # Magnitudes as bits: their order is that of the numbers, and NaN is the largest.
    size = tl.full((SIDE_BLOCK, MEMBER_BLOCK), 0, tl.int32)
    high = tl.full((SIDE_BLOCK, MEMBER_BLOCK), -float("inf"), tl.float32)
    low = tl.full((SIDE_BLOCK, MEMBER_BLOCK), float("inf"), tl.float32)
    for done in range(0, MEMBERS, MEMBER_BLOCK):
        member = done + tl.arange(0, MEMBER_BLOCK)
        mask = member[None, :] < count[:, None]
        i = start[:, None] + member[None, :] * step
        at = place_of(i, TOKEN, HEAD, NUMBER, HEADS, DIM, PLAIN)
        x = widened(tl.load(words + at, mask=mask, other=0), DTYPE)
        size = tl.maximum(size, x.to(tl.int32, bitcast=True) & _FINITE)
        if RULE == FLOORED:
            high = tl.maximum(high, tl.where(mask, x, -float("inf")))
            low = tl.minimum(low, tl.where(mask, x, float("inf")))
    sizes = tl.reduce(size, 1, larger)
    largest = sizes.to(tl.float32, bitcast=True)
    smallest = largest
    tl.store(flags + first + page + side * 0, 1, mask=sizes > LIMIT)
    inside = side < SIDES
    if RULE == FP8:
        stored = power_of_two(tl.div_rn(largest, MOST))
    elif RULE == FLOORED:
        smallest = tl.where(inside, tl.reduce(low, 1, smaller), 0.0)
        smallest = tl.where(smallest == 0, 0.0, smallest)  # of -0 and 0 either may be the smallest
        largest = tl.where(inside, tl.reduce(high, 1, larger), 0.0)
        stored = rounded(tl.div_rn(largest - smallest, MOST), UP)
        store_floor(floors, layer * SIDES + side, smallest, inside, DTYPE, LARGEST)
    else:
        stored = rounded(tl.div_rn(largest, MOST), UP)
    tl.store(scales + layer * SIDES + side, stored.to(tl.uint16).to(tl.int16, bitcast=True), mask=inside)

    if BITS == 8:
        reciprocal = reciprocal_of(scale_value(stored))
        for done in range(0, MEMBERS, MEMBER_BLOCK):
            member = done + tl.arange(0, MEMBER_BLOCK)
            mask = member[None, :] < count[:, None]
            i = start[:, None] + member[None, :] * step
            at = place_of(i, TOKEN, HEAD, NUMBER, HEADS, DIM, PLAIN)
            x = widened(tl.load(words + at, mask=mask, other=0), DTYPE)
            code = code_of(x, smallest[:, None], reciprocal[:, None], RULE)
            tl.store(codes + i, code.to(tl.uint8), mask=mask)


@triton.jit(do_not_specialize=["first"])
def pack(
    words, deltas, slots, halves, codes, flags, first,
    SLOT: tl.constexpr, PLANES: tl.constexpr, PLANE: tl.constexpr, TOKEN: tl.constexpr,
    HEAD: tl.constexpr, NUMBER: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PLAIN: tl.constexpr, ALIGNED: tl.constexpr, PAYLOAD: tl.constexpr, SCALES: tl.constexpr,
    FLOORS: tl.constexpr, SIDES_NEXT: tl.constexpr, CODES: tl.constexpr, CODES_NEXT: tl.constexpr,
    LAYER_CODES: tl.constexpr, NUMBERS: tl.constexpr, SIDES: tl.constexpr, LENGTH: tl.constexpr,
    MEMBERS: tl.constexpr, CHANNELS: tl.constexpr, DTYPE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes of 4 bits, after ``measure``: a byte for two numbers, half the page's tokens apart."""
    page, layer = tl.program_id(0), tl.program_id(1) // PLANES
    plane = (tl.program_id(1) % PLANES).to(tl.int64)
    delta = tl.multiple_of(tl.load(deltas + layer), ALIGNED)
    words += tl.load(slots + first + page) * SLOT + delta + plane * PLANE
    payload = page.to(tl.int64) * PAYLOAD
    scales = halves + (payload + SCALES + plane * SIDES_NEXT) // 2
    floors = halves + (payload + FLOORS + plane * SIDES_NEXT) // 2
    codes += payload + CODES + plane * CODES_NEXT + layer * LAYER_CODES

    byte = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    both = tl.full((BLOCK,), 0, tl.int32)
    for half in tl.static_range(2):
        i = byte + half * LAYER_CODES
        mask = (byte < LAYER_CODES) & (i < NUMBERS)
        at = place_of(i, TOKEN, HEAD, NUMBER, HEADS, DIM, PLAIN)
        x = widened(tl.load(words + at, mask=mask, other=0), DTYPE)
        side = layer * SIDES + side_of(i, LENGTH, MEMBERS, CHANNELS)
        reciprocal = reciprocal_of(scale_value(load_scale(scales, side, mask)))
        code = code_of(x, load_floor(floors, side, mask, DTYPE), reciprocal, FLOORED)
        both |= tl.where(mask, code & 15, 0) << (4 * half)
    tl.store(codes + byte, both.to(tl.uint8), mask=byte < LAYER_CODES)


@triton.jit(do_not_specialize=["first"])
def expand(
    words, deltas, slots, halves, codes, flags, first,
    SLOT: tl.constexpr, PLANES: tl.constexpr, PLANE: tl.constexpr, TOKEN: tl.constexpr,
    HEAD: tl.constexpr, NUMBER: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PLAIN: tl.constexpr, ALIGNED: tl.constexpr, PAYLOAD: tl.constexpr, SCALES: tl.constexpr,
    FLOORS: tl.constexpr, SIDES_NEXT: tl.constexpr, CODES: tl.constexpr, CODES_NEXT: tl.constexpr,
    LAYER_CODES: tl.constexpr, NUMBERS: tl.constexpr, SIDES: tl.constexpr, LENGTH: tl.constexpr,
    MEMBERS: tl.constexpr, CHANNELS: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr,
    LIMIT: tl.constexpr, MOST_SCALE: tl.constexpr, RULE: tl.constexpr, BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Numbers of ``BLOCK`` bytes of codes.

    ``flags[first + page]`` becomes 1 for what no encoder makes; the page then holds anything.
    """
    page, layer = tl.program_id(0), tl.program_id(1) // PLANES
    plane = (tl.program_id(1) % PLANES).to(tl.int64)
    delta = tl.multiple_of(tl.load(deltas + layer), ALIGNED)
    words += tl.load(slots + first + page) * SLOT + delta + plane * PLANE
    payload = page.to(tl.int64) * PAYLOAD
    scales = halves + (payload + SCALES + plane * SIDES_NEXT) // 2
    floors = halves + (payload + FLOORS + plane * SIDES_NEXT) // 2
    codes += payload + CODES + plane * CODES_NEXT + layer * LAYER_CODES

    byte = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    found = tl.load(codes + byte, mask=byte < LAYER_CODES, other=0).to(tl.int32)
    wrong = tl.full((BLOCK,), 0, tl.int32)
    for part in tl.static_range(8 // BITS):
        i = byte + part * LAYER_CODES
        inside = byte < LAYER_CODES
        mask = inside & (i < NUMBERS)
        code = found
        if BITS == 4:
            code = (found >> (4 * part)) & 15
        side = layer * SIDES + side_of(i, LENGTH, MEMBERS, CHANNELS)
        stored = load_scale(scales, side, mask)
        bad = mask & (stored > MOST_SCALE)
        x = value_of(code, RULE) * scale_value(stored)
        if RULE == FLOORED:
            floor = load_floor(floors, side, mask, DTYPE)
            bad |= mask & ((floor.to(tl.int32, bitcast=True) & _FINITE) > LIMIT)
            bad |= inside & (i >= NUMBERS) & (code != 0)
            x += floor
        elif RULE == FP8:
            bad |= mask & (((stored & 0x7F) != 0) | ((code & 0x7F) == 0x7F))
        else:
            bad |= mask & (code == 0x80)
        wrong |= bad.to(tl.int32)
        at = place_of(i, TOKEN, HEAD, NUMBER, HEADS, DIM, PLAIN)
        tl.store(words + at, narrowed(x, DTYPE, LARGEST), mask=mask)
    tl.store(flags + first + page, 1, mask=tl.reduce(wrong, 0, larger) > 0)


@triton.jit(do_not_specialize=["first"])
def keep(
    raw, deltas, slots, codes, first,
    SLOT: tl.constexpr, PLANES: tl.constexpr, PLANE: tl.constexpr, TOKEN: tl.constexpr,
    HEAD: tl.constexpr, NUMBER: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PLAIN: tl.constexpr, ITEM: tl.constexpr, PAYLOAD: tl.constexpr, AT: tl.constexpr,
    NBYTES: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bytes that are no numbers, as they are: from the page into the payload, or ``BACK``. Strides are of ``ITEM``
    bytes; ``NBYTES`` of a layer's plane."""
    page = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    layer, plane = row // PLANES, row % PLANES
    raw += (tl.load(slots + first + page) * SLOT + tl.load(deltas + layer) + plane * PLANE) * ITEM
    codes += page.to(tl.int64) * PAYLOAD + AT + row * NBYTES
    byte = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    mask = byte < NBYTES
    at = place_of(byte // ITEM, TOKEN, HEAD, NUMBER, HEADS, DIM, PLAIN) * ITEM + byte % ITEM
    if BACK:
        tl.store(raw + at, tl.load(codes + byte, mask=mask), mask=mask)
    else:
        tl.store(codes + byte, tl.load(raw + at, mask=mask), mask=mask)
