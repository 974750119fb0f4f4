"""Test that each bug planted in the codecs' arithmetic is noticed by a check of error bounds or of decoded pages."""

from __future__ import annotations

from dataclasses import asdict, replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.codecs.holding import FEATURES, assert_holds, page_like_kv, spec_of
from tests.support import planting
from tests.support.planting import Bug
from tierstore.codecs import LOSSY, lossy, quantization
from tierstore.codecs.lossy import Lossy, Scheme
from tierstore.errors import IntegrityError
from tierstore.page import PageLayout

pytestmark = pytest.mark.deep

BUGS: list[tuple[ModuleType, Bug]] = [
    (
        quantization,
        Bug("codes are cut, not rounded", "np.rint(numbers, out=numbers)", "np.trunc(numbers, out=numbers)"),
    ),
    (
        quantization,
        Bug(
            "negative numbers have no extent",
            "np.maximum(largest, -smallest)",
            "np.maximum(largest, -largest)",
        ),
    ),
    (
        quantization,
        Bug(
            "a step too many",
            "return (1 << self.bits - self.signed) - 1",
            "return 1 << self.bits - self.signed",
        ),
    ),
    (
        quantization,
        Bug(
            "floors are not added",
            "            if self.floored:\n                np.add(",
            "            if False:\n                np.add(",
        ),
    ),
    (
        quantization,
        Bug(
            "the tail group is left out",
            "            if inside.size:\n",
            "            if inside.size and not part.start:\n",
        ),
    ),
    (
        quantization,
        Bug("the tail group has the first one's scale", "slice(whole, whole + 1)),\n", "slice(0, 1)),\n"),
    ),
    (
        quantization,
        Bug("high nibbles stay low", "np.left_shift(high, 4, out=high)", "np.left_shift(high, 0, out=high)"),
    ),
    (
        quantization,
        Bug(
            "halves are swapped",
            "np.right_shift(codes, 4, out=nibbles)",
            "np.bitwise_and(codes, 15, out=nibbles)",
        ),
    ),
    (
        quantization,
        Bug(
            "steps are of the scale before it was rounded",
            "reciprocals(scale_values(stored))",
            "reciprocals(extent / np.float32(self.most))",
        ),
    ),
    (
        quantization,
        Bug("the nearest scale is the next smaller", "bits + 0x7FFF + (bits >> 16 & 1) >> 16", "bits >> 16"),
    ),
    (
        quantization,
        Bug(
            "scales are rounded down",
            "return (bits + 0xFFFF >> 16).astype(SCALE)",
            "return (bits >> 16).astype(SCALE)",
        ),
    ),
    (
        quantization,
        Bug("numbers are cut, not rounded", "np.add(odd, 0x7FFF, out=odd)", "np.multiply(odd, 0, out=odd)"),
    ),
    (
        quantization,
        Bug(
            "too large numbers become infinite",
            "np.clip(numbers, -limit, limit, out=numbers)",
            "np.multiply(numbers, np.float32(1), out=numbers)",
        ),
    ),
    (
        quantization,
        Bug(
            "scales may be subnormal",
            "_SMALLEST = np.float32(2.0**-126)",
            "_SMALLEST = np.float32(2.0**-148)",
        ),
    ),
    (
        quantization,
        Bug(
            "signs are lost", "np.bitwise_and(signs, 0x80, out=signs)", "np.bitwise_and(signs, 0, out=signs)"
        ),
    ),
    (quantization, Bug("numbers saturate", "_MOST = 448.0", "_MOST = 960.0")),
    (quantization, Bug("mantissas are cut", "np.add(odd, 0x7FFFF, out=odd)", "np.multiply(odd, 0, out=odd)")),
    (
        quantization,
        Bug(
            "subnormal codes are zero",
            "np.multiply(magnitudes, _PER_SUBNORMAL, out=magnitudes)",
            "np.multiply(magnitudes, _PER_SUBNORMAL / 9, out=magnitudes)",
        ),
    ),
    (lossy, Bug("values are keys", ")[:, self.index]", ")[:, 0]")),
    (
        lossy,
        Bug(
            "bytes between groups are skipped",
            "((start, end) for start, end in zip(starts, ends, strict=True) if start < end)",
            "((start, end) for start, end in zip(starts, ends, strict=True) if start < end - 4096)",
        ),
    ),
    (
        lossy,
        Bug(
            "layers of a part are skipped", "range(0, plane.layers, step)", "range(0, plane.layers, step + 1)"
        ),
    ),
]


def with_bug(module: ModuleType, bug: Bug | None, patch: pytest.MonkeyPatch) -> ModuleType:
    """Replace the module with a copy that contains the bug, and return the copy."""
    small = {"MOST_STORED": lossy.MOST_STORED, "_PART": lossy._PART} if module is lossy else {}
    planted = planting.install(patch, module, bug)
    vars(planted).update(small)
    return planted


def bugged(scheme: Scheme, planted: ModuleType) -> Any:
    """Return the scheme with the planted module's version of its class, if that module contains the class."""
    kind = vars(planted).get(type(scheme).__name__) if planted.__name__ == quantization.__name__ else None
    return scheme if kind is None else kind(**asdict(scheme))  # type: ignore[call-overload]


def hold_all(codecs: list[Lossy]) -> None:
    for codec in codecs:
        for seed, wanted in enumerate(
            [frozenset(), *(frozenset({name}) for name in FEATURES), frozenset(FEATURES)]
        ):
            for dtype in ("bfloat16", "float16", "float32"):
                layout = PageLayout.of([spec_of(dtype, 3, 37, 2, 40, 0), spec_of("uint8", 1, 37, 1, 5, 1)])
                assert_holds(codec, layout, page_like_kv(layout, seed, wanted))
    layout = PageLayout.of(spec_of("bfloat16", 2, 9, 1, 7, 0))
    assert_holds(codecs[-1], layout, np.zeros(layout.blob_nbytes, dtype=np.uint8))


@pytest.fixture(autouse=True)
def small_pages_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lossy, "MOST_STORED", 100.0)
    monkeypatch.setattr(lossy, "_PART", 6000)


def hold_with(module: ModuleType, bug: Bug | None, patch: pytest.MonkeyPatch) -> None:
    planted = with_bug(module, bug, patch)
    hold_all(
        [
            replace(codec, keys=bugged(codec.keys, planted), values=bugged(codec.values, planted))
            for codec in LOSSY.values()
        ]
    )


@pytest.mark.parametrize("module", [quantization, lossy])
def test_without_a_bug_all_checks_pass(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    hold_with(module, None, monkeypatch)


@pytest.mark.parametrize(("module", "bug"), BUGS, ids=[bug.name for _, bug in BUGS])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_planted_bug_is_noticed(module: ModuleType, bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    planting.find("tierstore.codecs", bug)  # fails if the bug is outdated
    with pytest.raises((AssertionError, IntegrityError, ValueError, IndexError)):
        hold_with(module, bug, monkeypatch)
