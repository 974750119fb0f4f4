"""Triton kernels that encode pages in HBM with fixed-length codecs, and decode them.

They produce the same bytes as ``tierstore.codecs``, because they do the same float32 arithmetic with the same
rounding. Launch them with ``enable_fp_fusion=False``: NumPy rounds each product before an addition, and a fused
multiply-add would not.

``measure``, ``pack``, ``expand`` and ``keep`` work on payloads in device memory. ``fetch`` decodes payloads
directly in mapped host memory, with the same results as ``expand``.

At any time, a program processes elements of one layer and plane of one page. Element i of ``[tokens, heads, dim]``
is ``place_of(i)`` elements after the plane's first element, which is ``slot * SLOT + deltas[layer] + plane *
PLANE`` elements after ``words``. Payloads are ``PAYLOAD`` bytes apart. ``halves`` (a pointer to int16) and
``codes`` (a pointer to uint8) both point to the first payload.
"""

# mypy: ignore-errors
from __future__ import annotations

from subprocess import CalledProcessError

import triton
import triton.language as tl

BFLOAT16 = tl.constexpr(0)
FLOAT16 = tl.constexpr(1)
FLOAT32 = tl.constexpr(2)
SIGNED = tl.constexpr(0)
FLOORED = tl.constexpr(1)
FP8 = tl.constexpr(2)

# Adding 1.5 * 2**23 rounds to an integer, ties to even.
_ROUND = tl.constexpr(12582912.0)
_SMALLEST = tl.constexpr(2.0**-126)
_LEAST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def place_of(
    i,
    TOKEN: tl.constexpr, HEAD: tl.constexpr, NUMBER: tl.constexpr,
    HEADS: tl.constexpr, DIM: tl.constexpr, PLAIN: tl.constexpr,
):  # fmt: skip
    """Return the offset, in elements, of element i of ``[tokens, heads, dim]``. It is i if ``PLAIN``."""
    at = i
    if not PLAIN:
        far = i.to(tl.int64)
        at = far // (HEADS * DIM) * TOKEN + far // DIM % HEADS * HEAD + far % DIM * NUMBER
    return at


@triton.jit
def side_of(i, LENGTH: tl.constexpr, MEMBERS: tl.constexpr, CHANNELS: tl.constexpr):
    """Return the index of element i's scale among the scales of its layer and plane."""
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
    """Convert float32 values to the words that the page stores. The result is never infinite."""
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
    """Return a scale as the bits of a bfloat16, rounded to nearest or, with ``UP``, rounded up."""
    bits = tl.where(scale > 0, tl.maximum(scale, _SMALLEST), 0.0).to(tl.uint32, bitcast=True)
    if UP:
        bits += 0xFFFF
    else:
        bits += 0x7FFF + ((bits >> 16) & 1)
    return bits >> 16


@triton.jit
def power_of_two(scale):
    """Round a scale up to a power of two, and return the bits of the result as a bfloat16."""
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
    """Return the low byte of the nearest integer, ties to even, in two's complement."""
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
    """Return the value of a code (an int32 from 0 to 255) as float32, before scaling."""
    if RULE == FP8:
        exponent, mantissa = (code >> 3) & 15, code & 7
        normal = ((exponent + 120) << 23) | (mantissa << 20)
        subnormal = (mantissa.to(tl.float32) * 0.001953125).to(tl.int32, bitcast=True)
        # The sign is set by its bit, because Triton negates by subtracting from 0, which never gives -0.
        bits = tl.where(exponent > 0, normal, subnormal) | ((code & 0x80) << 24)
        x = bits.to(tl.float32, bitcast=True)
    elif RULE == FLOORED:
        x = code.to(tl.float32)
    else:
        x = tl.where(code >= 0x80, code - 256, code).to(tl.float32)
    return x


@triton.jit
def store_floor(halves, at, floor, mask, DTYPE: tl.constexpr, LARGEST: tl.constexpr):
    if DTYPE == FLOAT32:  # two halves, because its address may not be a multiple of 4
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


REFUSALS = (triton.TritonError, CalledProcessError, OSError, RuntimeError)
"""Exceptions raised if Triton cannot compile, for example for an unsupported GPU or without a C compiler."""

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
    """Store the scales and minimums of ``SIDE_BLOCK`` groups of elements. With 8-bit codes, store the codes too.

    ``flags[first + page]`` becomes 1 if an element is NaN, infinite or too large.
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

    # Compare magnitudes as bit patterns, which have the same order as the values. NaN is the largest.
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
        smallest = tl.where(smallest == 0, 0.0, smallest)  # -0 and 0 are equal: always store 0
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
    """Store 4-bit codes. Launch it after ``measure``, whose scales and minimums it reads.

    Each byte contains the codes of two elements, whose tokens are half a page apart.
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
    """Decode ``BLOCK`` bytes of codes into elements of the page.

    If a payload cannot be the output of an encoder, ``flags[first + page]`` becomes 1 and the page's content
    is undefined.
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
    """Copy the unencoded part of a page from the page to the payload or, with ``BACK``, in the opposite direction.

    Strides are in units of ``ITEM`` bytes. ``NBYTES`` is the size in bytes of one plane of one layer.
    """
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


@triton.jit
def sides_of_rows(
    scales, floors, first, row, here,
    WIDTH: tl.constexpr, HALF: tl.constexpr, NUMBERS: tl.constexpr, DTYPE: tl.constexpr,
    RULE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Return the low scales, the low minimums, the high scales and the high minimums of some rows of codes.

    Low and high refer to the halves of a byte: all low halves in a row share one scale and one minimum, and so do
    all high halves. Results that the codec does not use are copies of the low scales: the minimums if the codec
    has none, and the results for the high halves if codes have 8 bits. ``first`` is the index of the layer's
    first scale.
    """
    low_scale = load_scale(scales, first + row, here)
    low_floor = low_scale
    high_scale = low_scale
    high_floor = low_scale
    if RULE == FLOORED:
        low_floor = load_floor(floors, first + row, here, DTYPE)
    if BITS == 4:
        here = here & ((row + HALF) * WIDTH < NUMBERS)
        high_scale = load_scale(scales, first + row + HALF, here)
        high_floor = load_floor(floors, first + row + HALF, here, DTYPE)
    return low_scale, low_floor, high_scale, high_floor


@triton.jit(do_not_specialize=["pages", "first", "layers"])
def fetch(
    words, deltas, table, flags, pages, first, layers,
    SLOT: tl.constexpr, PLANES: tl.constexpr, PLANE: tl.constexpr, TOKEN: tl.constexpr,
    HEAD: tl.constexpr, NUMBER: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
    PLAIN: tl.constexpr, ALIGNED: tl.constexpr, SCALES: tl.constexpr, FLOORS: tl.constexpr,
    SIDES_NEXT: tl.constexpr, CODES: tl.constexpr, CODES_NEXT: tl.constexpr,
    LAYER_CODES: tl.constexpr, NUMBERS: tl.constexpr, SIDES: tl.constexpr, MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr, DTYPE: tl.constexpr, LARGEST: tl.constexpr, LIMIT: tl.constexpr,
    MOST_SCALE: tl.constexpr, RULE: tl.constexpr, BITS: tl.constexpr, WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr, ROWS: tl.constexpr, TILE_ROWS: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, RAGGED: tl.constexpr, ALONG: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Decode payloads in mapped host memory, with few programs that loop over the tiles of all pages.

    ``table`` contains the slots, then the addresses of the payloads. Only layers ``[first, first + layers)`` are
    decoded. The codes of one plane of a layer form rows of ``WIDTH`` bytes. A tile has ``TILE_ROWS`` rows and
    ``COLUMNS`` bytes of each row. A plane is ``DOWN`` tiles high and ``ACROSS`` tiles wide. Each scale is read
    only by the tiles that need it, so nearly every byte of a payload is transferred only once.
    """
    HALF: tl.constexpr = LAYER_CODES // WIDTH
    each = layers * (PLANES * DOWN * ACROSS)
    # Read the table entries of the next tile ahead, because the table is in host memory too.
    page = tl.program_id(0) // each
    next_slot = tl.load(table + page, mask=page < pages, other=0)
    next_far = tl.load(table + pages + page, mask=page < pages, other=0)
    for tile in range(tl.program_id(0), pages * each, tl.num_programs(0)):
        slot = next_slot
        far = next_far
        page = (tile + tl.num_programs(0)) // each
        next_slot = tl.load(table + page, mask=page < pages, other=0)
        next_far = tl.load(table + pages + page, mask=page < pages, other=0)
        page = tile // each
        rest = tile - page * each
        layer = first + rest // (PLANES * DOWN * ACROSS)
        plane = (rest // (DOWN * ACROSS) % PLANES).to(tl.int64)
        top = rest // ACROSS % DOWN * TILE_ROWS
        column = rest % ACROSS * COLUMNS + tl.arange(0, COLUMNS)

        delta = tl.multiple_of(tl.load(deltas + layer), ALIGNED)
        near = words + slot * SLOT + delta + plane * PLANE
        halves = tl.multiple_of(far.to(tl.pointer_type(tl.int16)), 16)
        scales = halves + (SCALES + plane * SIDES_NEXT) // 2
        floors = halves + (FLOORS + plane * SIDES_NEXT) // 2
        codes = tl.multiple_of(far.to(tl.pointer_type(tl.uint8)), 16)
        codes += CODES + plane * CODES_NEXT + layer * LAYER_CODES

        if CHANNELS:
            low = layer * SIDES + top // MEMBERS * CHANNELS + column
            low_scale = load_scale(scales, low, column < CHANNELS)
            low_floor = load_floor(floors, low, column < CHANNELS, DTYPE)
            if BITS == 4:
                high = layer * SIDES + (top + HALF) // MEMBERS * CHANNELS + column
                has = (column < CHANNELS) & ((top + HALF) * WIDTH + column < NUMBERS)
                high_scale = load_scale(scales, high, has)
                high_floor = load_floor(floors, high, has, DTYPE)
        elif RULE == FP8:
            one_scale = tl.load(scales + layer * SIDES).to(tl.uint16, bitcast=True).to(tl.uint32)
        else:
            # Read the scales one iteration ahead. The loop's pipeline stages read the codes ahead.
            below = tl.arange(0, ROWS)
            here = (below < TILE_ROWS) & (top + below < HALF)
            next_low_scale, next_low_floor, next_high_scale, next_high_floor = sides_of_rows(
                scales, floors, layer * SIDES, top + below, here, WIDTH, HALF, NUMBERS, DTYPE, RULE, BITS
            )

        for done in tl.range(0, TILE_ROWS, ROWS, num_stages=STAGES):
            below = done + tl.arange(0, ROWS)
            row = top + below
            byte = row[:, None] * WIDTH + column[None, :]
            inside = byte < LAYER_CODES
            if RAGGED:
                inside = inside & (below < TILE_ROWS)[:, None] & (column < WIDTH)[None, :]
            if not CHANNELS and RULE != FP8:
                low_scale = next_low_scale
                low_floor = next_low_floor
                high_scale = next_high_scale
                high_floor = next_high_floor
                here = (below + ROWS < TILE_ROWS) & (row + ROWS < HALF)
                next_low_scale, next_low_floor, next_high_scale, next_high_floor = sides_of_rows(
                    scales, floors, layer * SIDES, row + ROWS, here, WIDTH, HALF, NUMBERS, DTYPE, RULE, BITS
                )
            found = tl.load(codes + byte, mask=inside, other=0, cache_modifier=".cg").to(tl.int32)
            for part in tl.static_range(8 // BITS):
                i = byte + part * LAYER_CODES
                mask = inside & (i < NUMBERS)
                code = found
                if BITS == 4:
                    code = (found >> (4 * part)) & 15
                if RULE == FP8:
                    stored = one_scale
                elif part == 0:
                    stored = tl.expand_dims(low_scale, ALONG)
                else:
                    stored = tl.expand_dims(high_scale, ALONG)
                bad = mask & (stored > MOST_SCALE)
                x = value_of(code, RULE) * scale_value(stored)
                if RULE == FLOORED:
                    floor = tl.expand_dims(low_floor, ALONG)
                    if part == 1:
                        floor = tl.expand_dims(high_floor, ALONG)
                    bad = bad | (mask & ((floor.to(tl.int32, bitcast=True) & _FINITE) > LIMIT))
                    bad = bad | (inside & (i >= NUMBERS) & (code != 0))
                    x = x + floor
                elif RULE == FP8:
                    bad = bad | (mask & (((stored & 0x7F) != 0) | ((code & 0x7F) == 0x7F)))
                else:
                    bad = bad | (mask & (code == 0x80))
                at = place_of(i, TOKEN, HEAD, NUMBER, HEADS, DIM, PLAIN)
                tl.store(near + at, narrowed(x, DTYPE, LARGEST), mask=mask)
                wrong = tl.reduce(bad.to(tl.int32), ALONG, larger)
                tl.store(flags + page + wrong * 0, 1, mask=wrong > 0)
