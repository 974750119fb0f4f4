"""The Triton kernel that decodes payloads where they lie in mapped host memory.

It makes the numbers that ``coding_kernels.expand`` makes of the same payloads in device memory, and addresses pages as
that does; launch it with ``enable_fp_fusion=False`` too.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from tierstore.gpu.coding_numbers import (
    FLOORED,
    FP8,
    larger,
    load_floor,
    load_scale,
    narrowed,
    place_of,
    scale_value,
    value_of,
)

_FINITE = tl.constexpr(0x7FFFFFFF)


@triton.jit
def sides_of_rows(
    scales, floors, first, row, here,
    WIDTH: tl.constexpr, HALF: tl.constexpr, NUMBERS: tl.constexpr, DTYPE: tl.constexpr,
    RULE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Scales and smallest numbers of both numbers of each byte of these rows, which have one each; what a codec has not
    is some scale. ``first``: of the layer."""
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
    """``coding_kernels.expand`` of payloads in mapped host memory, by few programs that take tiles in turns.

    ``table``: slots, then addresses of payloads. Layers ``[first, first + layers)``. Codes of a plane are rows of
    ``WIDTH`` bytes; a tile has ``TILE_ROWS`` of them, one of ``DOWN``, and ``COLUMNS`` bytes of each, one of
    ``ACROSS``. Every byte crosses the link once: each scale is read by the one tile that needs it.
    """
    HALF: tl.constexpr = LAYER_CODES // WIDTH
    each = layers * (PLANES * DOWN * ACROSS)
    # Of the next tile too, as the table crosses the link as well.
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
            # Ahead of their codes, as these come by turns ahead too.
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
