"""Triton kernels for attention over pages (split over keys, then merged) and for gathering pages for SDPA.

Each program of ``attend`` handles a block of rows of one sequence, one head of K and V, and a range of tokens.
Row ``r`` is query ``r // GROUP`` and head ``r % GROUP`` among the query heads that share the head of K and V.
Tiles of tokens start at multiples of ``BLOCK_N``. A key has ``DV + DR`` elements. If ``SHARED``, its first
``DV`` elements are also the value. Scores are exponents to base 2.

The split over keys follows Flash-Decoding (Dao et al. 2023), and the online softmax follows FlashAttention-2.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def larger(a, b):
    """Return the larger of two values, for reductions."""
    return tl.maximum(a, b)


@triton.jit
def added(a, b):
    """Return the sum of two values, for reductions."""
    return a + b


@triton.jit
def _pages_of(table, n, first, end, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the page that contains the tile at token ``n``, or each token's page if a tile may span pages."""
    if PAGE % BLOCK_N == 0:
        found = tl.load(table + n // PAGE, mask=n < end, other=0)
    else:
        token = n + tl.arange(0, BLOCK_N)
        found = tl.load(table + token // PAGE, mask=(token >= first) & (token < end), other=0)
    return found.to(tl.int64)


@triton.jit
def _tile(
    state, q, qr, keys, pages, n, first, end, place,
    kv_page, kv_plane, kv_token, scale, window,
    PAGE: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SHARED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    top, total, mixed = state
    token = n + tl.arange(0, BLOCK_N)
    dim = tl.arange(0, BLOCK_V)
    if PAGE % BLOCK_N == 0:
        rows = keys + pages * kv_page + (n % PAGE + tl.arange(0, BLOCK_N))[:, None] * kv_token
    else:
        rows = keys + (pages * kv_page)[:, None] + (token % PAGE)[:, None] * kv_token
    inside = (token >= first) & (token < end)
    if MASKED:
        known = inside[:, None] & (dim < DV)[None, :]
    else:
        known = tl.full((BLOCK_N, BLOCK_V), 1, tl.int1) & (dim < DV)[None, :]
    if MASKED or DV < BLOCK_V:
        key = tl.load(rows + dim[None, :], mask=known, other=0.0)
    else:
        key = tl.load(rows + dim[None, :])
    score = tl.dot(q, tl.trans(key), input_precision=PRECISION)
    if DR > 0:
        rest = tl.arange(0, BLOCK_R)
        more = tl.load(rows + DV + rest[None, :], mask=inside[:, None] & (rest < DR)[None, :], other=0.0)
        score = tl.dot(qr, tl.trans(more), score, input_precision=PRECISION)
    if SHARED:
        value = key
    elif MASKED or DV < BLOCK_V:
        value = tl.load(rows + kv_plane + dim[None, :], mask=known, other=0.0)
    else:
        value = tl.load(rows + kv_plane + dim[None, :])
    score *= scale
    if MASKED:
        seen = inside[None, :]
        if CAUSAL:
            seen = seen & (token[None, :] <= place[:, None])
        if WINDOW:
            seen = seen & (token[None, :] >= place[:, None] - window)
        score = tl.where(seen, score, -float("inf"))
    higher = tl.maximum(top, tl.reduce(score, 1, larger))
    floor = higher
    if MASKED:
        floor = tl.where(higher == -float("inf"), 0.0, higher)
    weight = tl.exp2(score - floor[:, None])
    decay = tl.exp2(top - floor)
    total = total * decay + tl.reduce(weight, 1, added)
    mixed = mixed * decay[:, None]
    mixed = tl.dot(weight.to(value.dtype), value, mixed, input_precision=PRECISION)
    return higher, total, mixed


@triton.jit
def attend(
    q, kv, table, items, out, lse, parts, part_lse,
    q_token, q_head, kv_page, kv_plane, kv_token, kv_head, scale, window,
    HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE: tl.constexpr, DV: tl.constexpr, DR: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SHARED: tl.constexpr, PRECISION: tl.constexpr,
    FIELDS: tl.constexpr,
):  # fmt: skip
    """Compute one work item for one head of K and V.

    See ``in_place.FIELDS`` for the fields of an item. An item without rows is skipped.
    """
    head = tl.program_id(0)
    items += tl.program_id(1) * FIELDS
    table += tl.load(items)
    length, first, end = tl.load(items + 1), tl.load(items + 2), tl.load(items + 3)
    query0, width, row0 = tl.load(items + 4), tl.load(items + 5), tl.load(items + 6)
    part, splits = tl.load(items + 7), tl.load(items + 8)
    if row0 >= width * GROUP:
        return

    row = row0 + tl.arange(0, BLOCK_M)
    query = row // GROUP
    heads = head * GROUP + row % GROUP
    dim = tl.arange(0, BLOCK_V)
    rest = tl.arange(0, BLOCK_R)
    whose = q + ((query0 + query).to(tl.int64) * q_token + heads * q_head)[:, None]
    there = (query < width)[:, None]
    question = tl.load(whose + dim[None, :], mask=there & (dim < DV)[None, :], other=0.0)
    more = question
    if DR > 0:
        more = tl.load(whose + DV + rest[None, :], mask=there & (rest < DR)[None, :], other=0.0)
    place = length - width + query
    keys = kv + head.to(tl.int64) * kv_head

    start = first // BLOCK_N * BLOCK_N
    full = start
    if not WINDOW:
        full = end
        if CAUSAL:
            full = tl.minimum(end, length - width + row0 // GROUP + 1)
        full = tl.maximum(full // BLOCK_N * BLOCK_N, start)
    top = tl.full((BLOCK_M,), -float("inf"), tl.float32)
    total = tl.full((BLOCK_M,), 0.0, tl.float32)
    mixed = tl.full((BLOCK_M, BLOCK_V), 0.0, tl.float32)
    # Read the next tile's page number while this tile is loaded, so that the next load can start at once.
    pages = _pages_of(table, start, first, end, PAGE, BLOCK_N)
    for n in range(start, full, BLOCK_N):
        following = _pages_of(table, n + BLOCK_N, first, end, PAGE, BLOCK_N)
        top, total, mixed = _tile(
            (top, total, mixed), question, more, keys, pages, n, first, end, place,
            kv_page, kv_plane, kv_token, scale, window,
            PAGE, DV, DR, BLOCK_V, BLOCK_R, BLOCK_N, False, CAUSAL, WINDOW, SHARED, PRECISION,
        )  # fmt: skip
        pages = following
    for n in range(full, end, BLOCK_N):
        pages = _pages_of(table, n, first, end, PAGE, BLOCK_N)
        top, total, mixed = _tile(
            (top, total, mixed), question, more, keys, pages, n, first, end, place,
            kv_page, kv_plane, kv_token, scale, window,
            PAGE, DV, DR, BLOCK_V, BLOCK_R, BLOCK_N, True, CAUSAL, WINDOW, SHARED, PRECISION,
        )  # fmt: skip

    nothing = total == 0
    mixed = mixed / tl.where(nothing, 1.0, total)[:, None]
    logs = tl.where(nothing, -float("inf"), (top + tl.log2(tl.where(nothing, 1.0, total))) * _LN2)
    known = there & (dim < DV)[None, :]
    if splits == 1:
        at = (query0 + query).to(tl.int64) * HEADS + heads
        tl.store(out + at[:, None] * DV + dim[None, :], mixed.to(out.dtype.element_ty), mask=known)
        tl.store(lse + at, logs, mask=query < width)
    else:
        at = (part + query * splits).to(tl.int64) * HEADS + heads
        tl.store(parts + at[:, None] * DV + dim[None, :], mixed, mask=known)
        tl.store(part_lse + at, logs, mask=query < width)


@triton.jit
def merge(
    parts, part_lse, queries, out, lse,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Merge the parts of one query and head into ``out`` and ``lse``.

    ``queries`` contains the first part and the number of parts of each query. A query with one part is skipped,
    because ``attend`` has already stored its result.
    """
    query, head = tl.program_id(0), tl.program_id(1)
    part, splits = tl.load(queries + query * 2), tl.load(queries + query * 2 + 1)
    if splits == 1:
        return
    dim = tl.arange(0, BLOCK_V)
    top, total = -float("inf"), 0.0
    mixed = tl.full((BLOCK_V,), 0.0, tl.float32)
    for done in range(0, splits, BLOCK_S):
        split = done + tl.arange(0, BLOCK_S)
        at = (part + split).to(tl.int64) * HEADS + head
        logs = tl.load(part_lse + at, mask=split < splits, other=-float("inf"))
        known = (split < splits)[:, None] & (dim < DV)[None, :]
        found = tl.load(parts + at[:, None] * DV + dim[None, :], mask=known, other=0.0)
        higher = tl.maximum(top, tl.reduce(logs, 0, larger))
        floor = tl.where(higher == -float("inf"), 0.0, higher)
        weight, decay = tl.exp(logs - floor), tl.exp(top - floor)
        total = total * decay + tl.reduce(weight, 0, added)
        mixed = mixed * decay + tl.reduce(weight[:, None] * found, 0, added)
        top = higher
    nothing = total == 0
    mixed = mixed / tl.where(nothing, 1.0, total)
    at = query.to(tl.int64) * HEADS + head
    tl.store(out + at * DV + dim, mixed.to(out.dtype.element_ty), mask=dim < DV)
    tl.store(lse + at, tl.where(nothing, -float("inf"), top + tl.log(tl.where(nothing, 1.0, total))))


@triton.jit
def join(
    sums, sum_lse, found, found_lse, out, places, found_head, found_query, lse_head, lse_query,
    HEADS: tl.constexpr, DV: tl.constexpr, BLOCK_V: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """Merge attention over further keys into the previous result of one query and head.

    ``found`` and ``found_lse`` contain the attention over the further keys, ``sums`` and ``sum_lse`` the previous
    result, which is ignored with ``FIRST``. With ``LAST``, the merged result is stored in ``out`` instead of
    ``sums``. With ``PLACED``, query i of ``found`` is query ``places[i]`` of all other tensors.
    """
    query, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dim = tl.arange(0, BLOCK_V)
    known = dim < DV
    at = query
    if PLACED:
        at = tl.load(places + query).to(tl.int64)
    at = at * HEADS + head
    mixed = tl.load(found + head * found_head + query * found_query + dim, mask=known, other=0.0).to(
        tl.float32
    )
    logs = tl.load(found_lse + head * lse_head + query * lse_query)
    if not FIRST:
        before = tl.load(sum_lse + at)
        higher = tl.maximum(before, logs)
        floor = tl.where(higher == -float("inf"), 0.0, higher)
        mine, other = tl.exp(logs - floor), tl.exp(before - floor)
        nothing = mine + other == 0
        total = tl.where(nothing, 1.0, mine + other)
        sums_here = tl.load(sums + at * DV + dim, mask=known, other=0.0)
        mixed = (mixed * mine + sums_here * other) / total
        logs = tl.where(nothing, -float("inf"), floor + tl.log(total))
    if LAST:
        tl.store(out + at * DV + dim, mixed.to(out.dtype.element_ty), mask=known)
    else:
        tl.store(sums + at * DV + dim, mixed, mask=known)
    tl.store(sum_lse + at, logs)


@triton.jit
def gather(
    kv, table, out, first, kv_page, kv_plane, kv_token, kv_head, out_plane,
    HEADS: tl.constexpr, DIM: tl.constexpr, TOKENS: tl.constexpr, FLAT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Copy one plane of one page to ``out``, ``[planes, tokens, heads, dim]``.

    The page is ``table[first + program_id(0)]``, the plane is ``program_id(1)``. With ``FLAT``, the elements
    of a page's plane are contiguous.
    """
    page, plane = tl.program_id(0), tl.program_id(1).to(tl.int64)
    kv += tl.load(table + first + page).to(tl.int64) * kv_page + plane * kv_plane
    out += plane * out_plane + page.to(tl.int64) * (TOKENS * HEADS * DIM)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    known = i < TOKENS * HEADS * DIM
    at = i
    if not FLAT:
        at = i // (HEADS * DIM) * kv_token + i // DIM % HEADS * kv_head + i % DIM
    tl.store(out + i, tl.load(kv + at, mask=known), mask=known)
