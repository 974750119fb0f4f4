"""Tests that the interpreted coding kernels produce the same bytes as the codecs on the CPU."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from triton.runtime.errors import InterpreterError

from tests.adapters import encoded_blocks as blocks
from tests.codecs.holding import FEATURES, FLOATS, Bytes, page_like_kv, spec_of
from tests.core.coding import Bench
from tests.core.interpreted import interpreted
from tests.support import lanes
from tests.support.planting import Bug, write
from tierstore.adapters.vllm.kv_groups import Heads
from tierstore.codecs import LOSSY, fixed_nbytes
from tierstore.gpu import addresses
from tierstore.gpu.engine_pages import EnginePages
from tierstore.gpu.quant import coder
from tierstore.page import PageLayout

NAMES = [name for name, codec in LOSSY.items() if not codec.zstd]
KERNELS_HERE = interpreted()
WORDS = {"bfloat16": "<u2", "float16": "<u2", "float32": "<u4"}
PAIRS = list(product(NAMES, FLOATS))
EACH = lanes.some(PAIRS, lambda name, dtype: name == "int8" or dtype == "bfloat16")
"""Pairs of codec and dtype: each codec and dtype at least once in `make test`, all pairs in `make test-all`."""

NO_EXPONENT = {"bfloat16": 0x807F, "float16": 0x83FF, "float32": 0x807FFFFF}


def many_groups(dtype: str, tokens: int = 9) -> PageLayout:
    """Return a layout of four KV groups with gaps between them: two that are encoded, and two that are not.

    The planes of the encoded groups end in scale groups that are shorter than the others.
    """
    return PageLayout.of(
        [
            spec_of(dtype, 2, tokens, 2, 80),
            spec_of("uint8", 2, tokens, 1, 7, 1),
            spec_of(dtype, 1, tokens, 1, 70, 2, "mla"),
            spec_of("float32", 1, tokens, 2, 3, 3, "state"),
        ]
    )


def some_pages(layout: PageLayout, features: frozenset[str], number: int = 2) -> list[Bytes]:
    return [page_like_kv(layout, seed, features) for seed in range(number)]


def all_subnormal(page: Bytes, layout: PageLayout) -> Bytes:
    """Clear the exponents of the page's elements, so that they are subnormal, and return the page."""
    for spec, offset in zip(layout.specs, layout.offsets, strict=True):
        if spec.kind != "state" and spec.dtype in FLOATS:
            page[offset : offset + spec.page_nbytes].view(WORDS[spec.dtype])[:] &= NO_EXPONENT[spec.dtype]
    return page


def require_all_the_same(name: str, dtype: str, kernels: ModuleType = KERNELS_HERE) -> None:
    layout = many_groups(dtype)
    varied = [page_like_kv(layout, seed, frozenset(FEATURES)) for seed in range(lanes.examples(1, 2))]
    plain = page_like_kv(layout, 2, frozenset({"outliers"}))
    bench = Bench(name, layout, [*varied, plain, all_subnormal(plain.copy(), layout)], kernels)
    bench.own_slots()
    bench.require_same()


def require_every_codec(kernels: ModuleType) -> None:
    for name in NAMES:
        for dtype in FLOATS:
            require_all_the_same(name, dtype, kernels)


@pytest.mark.parametrize(("name", "dtype"), EACH)
def test_payloads_and_pages_equal_those_of_the_cpu(name: str, dtype: str) -> None:
    require_all_the_same(name, dtype)


@settings(max_examples=lanes.examples(5, 150))
@given(
    name=st.sampled_from(NAMES),
    dtype=st.sampled_from(FLOATS),
    kind=st.sampled_from(["mha", "mla"]),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 40), st.integers(1, 3), st.integers(1, 140)),
    features=st.sets(st.sampled_from(FEATURES)),
    seed=st.integers(0, 1000),
)
def test_pages_of_any_size_are_coded_as_on_the_cpu(
    name: str,
    dtype: str,
    kind: str,
    sizes: tuple[int, int, int, int],
    features: set[str],
    seed: int,
) -> None:
    layout = PageLayout.of(spec_of(dtype, *sizes, 0, kind))
    assume(fixed_nbytes(name, layout) is not None)
    bench = Bench(name, layout, [page_like_kv(layout, seed, frozenset(features))], KERNELS_HERE)
    bench.own_slots()
    bench.require_same()


@pytest.mark.deep
def test_groups_longer_than_a_program_holds_are_coded_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coder, "BLOCK", 32)
    layout = PageLayout.of(spec_of("bfloat16", 1, 35, 1, 70, 0, "mla"))
    for name in ("int8", "fp8", "k8v4"):
        bench = Bench(name, layout, some_pages(layout, frozenset({"outliers"}), 1), KERNELS_HERE)
        bench.own_slots()
        bench.require_same()


@pytest.mark.parametrize(
    ("name", "letters"),
    lanes.some(
        product(NAMES, ("BHNKD", "BKNHD", "KBNHD", "DNHKB")),
        lambda name, letters: name == "k8v4" and letters == "BHNKD",
    ),
)
def test_engine_tensors_are_encoded_in_place_with_any_strides(name: str, letters: str) -> None:
    layout = PageLayout.of(
        [
            spec_of("bfloat16", 3, 9, 2, 64),
            spec_of("uint8", 2, 9, 1, 6, 1),
            spec_of("float32", 1, 9, 1, 40, 2),
        ]
    )
    bench = Bench(name, layout, some_pages(layout, frozenset({"outliers"}), 3), KERNELS_HERE)
    engine = []
    for spec in layout.specs:
        layers, *rest = spec.shape
        sizes = dict(zip("BKNHD", (3, *rest), strict=True))
        shape = [sizes[letter] for letter in letters]
        engine.append(
            EnginePages(
                [torch.zeros(shape, dtype=getattr(torch, spec.dtype)) for _ in range(layers)], letters
            )
        )
    bench.engine_slots(engine)
    bench.require_same(gaps=False)


@pytest.mark.parametrize("heads", [blocks.MHA, blocks.ODD, blocks.MLA], ids=["64", "80", "one latent vector"])
@pytest.mark.parametrize("order", ["BLHNC", "LBNHC", "LHBNC", "BHLNC"])
def test_blocks_of_vllm_are_encoded_in_place(order: str, heads: Heads) -> None:
    found = blocks.layout_of(blocks.tensors_of(order, heads, "cpu"), heads)
    layout = PageLayout.of(found.spec)
    bench = Bench("int8", layout, some_pages(layout, frozenset({"outliers"}), 3), KERNELS_HERE)
    bench.engine_slots([found.pages])
    bench.require_same()


def test_layers_of_different_strides_cannot_be_encoded_in_place() -> None:
    here, there = torch.zeros(4, 2, 3, 1, 8), torch.zeros(4, 3, 2, 1, 8).transpose(1, 2)
    assert here.shape == there.shape
    assert addresses.tensor_strides([[here, here.clone()]]) is not None
    assert addresses.tensor_strides([[here, there]]) is None


UNFIT = {
    "bfloat16": [0x7FC0, 0xFFC0, 0x7F80, 0xFF80, 0x7E81, 0xFE81, 0x7F81],
    "float16": [0x7E00, 0xFE00, 0x7C00, 0xFC00, 0x7C01],
    "float32": [0x7FC00000, 0xFF800000, 0x7F800000, 0x7E800001, 0xFE800001, 0x7F800001],
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    lanes.some(PAIRS, lambda name, dtype: name in ("int8", "int4") and dtype == "bfloat16"),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # arithmetic on NaN and infinity
def test_pages_that_the_codec_cannot_represent_are_flagged_and_the_others_arrive(
    name: str, dtype: str
) -> None:
    layout = many_groups(dtype)
    chance = np.random.default_rng(5)
    found = some_pages(layout, frozenset(), len(UNFIT[dtype]) + 2)
    for page, word in zip(found[1:-1], UNFIT[dtype], strict=True):
        group = int(chance.choice([0, 2]))  # the encoded KV groups
        numbers = page[layout.offsets[group] :][: layout.specs[group].page_nbytes].view(WORDS[dtype])
        numbers[int(chance.integers(len(numbers)))] = word
    fit = {0, len(found) - 1}
    bench = Bench(name, layout, found, KERNELS_HERE)
    bench.own_slots()
    payloads, flags = bench.encode()
    assert [not flag for flag in flags] == [slot in fit for slot in bench.order]
    for slot, payload in zip(bench.order, payloads, strict=True):
        if slot in fit:
            np.testing.assert_array_equal(payload, bench.encoded(slot))


@pytest.mark.parametrize(
    ("name", "dtype"),
    lanes.some(PAIRS, lambda name, dtype: (name, dtype) in (("int8", "float16"), ("fp8", "bfloat16"))),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_payloads_that_the_cpu_refuses_are_flagged(name: str, dtype: str) -> None:
    layout = PageLayout.of(spec_of(dtype, 1, 5, 1, 70))
    bench = Bench(name, layout, some_pages(layout, frozenset(), 6), KERNELS_HERE)
    bench.own_slots()
    chance = np.random.default_rng(6)
    refused = 0
    for _ in range(3):
        payloads = [bench.encoded(slot) for slot in bench.order]
        payloads[1][1] |= 0x7F  # the high byte of the first scale
        for payload in payloads[2:]:
            at = int(chance.integers(len(payload)))
            payload[at] = chance.choice([0x7F, 0x80, 0xFF, 0xF0])
        _, flags = bench.decode(payloads)
        accepted = [bench.accepted(payload) for payload in payloads]
        assert [not flag for flag in flags] == accepted
        refused += accepted.count(False)
    assert refused >= 3


BUGS = [
    Bug("codes are rounded down", "return (y + _ROUND)", "return (y - 0.5 + _ROUND)"),
    Bug("reciprocals are inexact", "tl.div_rn(1.0, ", "tl.div_rn(0.9999999, "),
    Bug("scales are truncated", "bits += 0x7FFF + ((bits >> 16) & 1)", "bits += 0"),
    Bug("ties of scales are rounded up", "((bits >> 16) & 1)\n    return", "1\n    return"),
    Bug(
        "small scales are not raised to the minimum",
        "tl.maximum(scale, _SMALLEST), 0.0).to(tl.uint32, bitcast=True)\n    if UP",
        "scale, 0.0).to(tl.uint32, bitcast=True)\n    if UP",
    ),
    Bug("fp8 has no -0", " | ((code & 0x80) << 24)", ""),
    Bug("fp8 subnormals become zero", "* 512.0", "* 0.0"),
    Bug("the high half of a floor is dropped", "(high << 16) | low", "low"),
    Bug("a shorter last group is dropped", "((LENGTH + MEMBERS - 1) // MEMBERS)", "(LENGTH // MEMBERS)"),
    Bug(
        "infinities count as finite",
        "_FINITE = tl.constexpr(0x7FFFFFFF)",
        "_FINITE = tl.constexpr(0x7F7FFFFF)",
    ),
    Bug("-0 is stored as a floor", "tl.where(smallest == 0, 0.0, smallest)", "smallest"),
    Bug("both codes go into the low half of a byte", "<< (4 * half)", "<< 0"),
    Bug(
        "all layers store their scales in the first layer's place",
        "tl.store(scales + layer * SIDES + side, stored",
        "tl.store(scales + side, stored",
    ),
    Bug(
        "bytes outside the planes are not stored",
        "tl.store(codes + byte, tl.load(raw + at, mask=mask), mask=mask)",
        "tl.load(raw + at, mask=mask)",
    ),
]


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug, tmp_path: Path) -> None:
    kernels = interpreted(write("tierstore.gpu.quant", bug, tmp_path))
    with pytest.raises((AssertionError, InterpreterError)):
        require_every_codec(kernels)
