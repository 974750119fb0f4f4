"""Test attention over pages in HBM and pages that stream from host memory, against results in float64.

Copies run on a thread that stalls. Slabs contain NaN until a copy has arrived."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import sleep
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.attention.interpreted import interpreted
from tests.attention.test_gathered import plain_sdpa
from tests.support import lanes, planting
from tests.support.planting import Bug
from tierstore.codecs.host_format import Packer, Unpacker
from tierstore.errors import IntegrityError
from tierstore.gpu.attention import gathered, streamed
from tierstore.gpu.attention.backends import attend
from tierstore.gpu.attention.gathered import Room
from tierstore.gpu.attention.in_place import Parts
from tierstore.gpu.attention.page_stream import PageStream
from tierstore.gpu.attention.page_table import Paging
from tierstore.gpu.attention.paged import shape_of
from tierstore.gpu.attention.streamed import StreamedDecode, StreamedPrefill, divide
from tierstore.host.arena import HostArena
from tierstore.page import PageLayout, PageSpec

LAYERS = 3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
KERNELS_HERE = interpreted()


@dataclass(frozen=True)
class Step:
    """The sequences of a step.

    Attributes:
        prefixes: For each prefix that several sequences share, its number of pages.
        of: For each sequence, the index of its prefix.
        own: For each sequence, its number of tokens after the prefix.
        widths: For each sequence, its number of queries.
        share: Probability that a page is in host memory.
    """

    prefixes: Sequence[int]
    of: Sequence[int]
    own: Sequence[int]
    widths: Sequence[int]
    page_size: int = 4
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    window_left: int = -1
    rows: int = 2
    slabs: int = 3
    share: float = 0.7
    seed: int = 0
    codec: str = "none"


class Stalling:
    """A filler whose slabs contain NaN until a copy that takes a random time has arrived."""

    def __init__(self, filler: Any, stream: Any, seed: int) -> None:
        self._filler, self._stream = filler, stream
        self._chance = random.Random(seed)

    def fill(self, slab: Any, layer: int, slots: NDArray[np.int64]) -> None:
        self._stream.queue(lambda: slab.rows.fill_(0xFF))
        self._stream.queue(partial(sleep, self._chance.choice([0, 0, 1e-4, 1e-3])))
        self._filler.fill(slab, layer, slots)

    def refused(self) -> set[int]:
        found: set[int] = self._filler.refused()
        return found


class Scene:
    """A step with its pages: all of them in one pool for the reference, and divided into two pools."""

    def __init__(self, step: Step) -> None:
        self.step, size = step, step.page_size
        self.chance = np.random.default_rng(step.seed)
        self.dtype = torch.float32 if step.codec == "none" else torch.bfloat16
        self.spec = PageSpec(
            num_layers=LAYERS, page_size=size, num_kv_heads=step.num_kv_heads, head_dim=step.head_dim,
            dtype=str(self.dtype).removeprefix("torch."), model="streamed",
        )  # fmt: skip
        shared, self.tables, total = [], [], 0
        for pages in step.prefixes:
            shared.append(np.arange(total, total + pages))
            total += pages
        for prefix, own in zip(step.of, step.own, strict=True):
            count = -(-own // size)
            self.tables.append(np.concatenate([shared[prefix], np.arange(total, total + count)]))
            total += count
        self.whole_lens = [step.prefixes[i] * size + own for i, own in zip(step.of, step.own, strict=True)]
        self.total = max(1, total)
        torch.manual_seed(step.seed)
        self.whole = torch.randn(self.total, *self.spec.shape).to(self.dtype)
        self.hbm = torch.full_like(self.whole, torch.nan)
        self.arena = HostArena(PageLayout.of(self.spec), self.total, codec=step.codec)
        self.queries = np.cumsum([0, *step.widths])
        self.q = torch.randn(LAYERS, int(self.queries[-1]), step.num_kv_heads * step.group, step.head_dim)
        self.q = self.q.to(self.dtype)
        nbytes = self.spec.layer_nbytes * step.rows
        self.stream = PageStream.open(self.arena, "cpu", ring_nbytes=nbytes * step.slabs, slab_nbytes=nbytes)
        stalling: Any = Stalling(self.stream._filler, self.stream._ring.stream, step.seed)
        self.stream._filler = stalling
        self.place(step.share)
        self.set_lens(self.whole_lens)

    def place(self, share: float) -> None:
        """Put each page into host memory with the probability ``share``, else into HBM, in a random slot."""
        self.put(self.chance.random(self.total) < share, self.chance.permutation(self.total))

    def put(self, host: NDArray[np.bool_], slots: NDArray[np.int64]) -> None:
        """Put each page into the slot ``slots[page]`` of host memory or, where ``host`` is false, of HBM."""
        self._host, self._slot = host, slots
        self.hbm.fill_(torch.nan)
        packer = Packer(self.arena.held) if self.arena.held.encoded else None
        for page in range(self.total):
            slot, content = int(self._slot[page]), self.whole[page]
            if not self._host[page]:
                self.hbm[slot] = content
                continue
            raw, view = content.view(torch.uint8).numpy().reshape(-1), self.arena.view(slot)
            if packer is None:
                view[: len(raw)] = raw
            else:
                assert packer.pack(raw, view)
                Unpacker(self.arena.held).unpack(view, raw)  # the reference sees what the codec has kept

    def set_lens(self, lens: Sequence[int]) -> None:
        """Make each sequence this long, in tokens."""
        self.lens, size = lens, self.step.page_size
        tables = [table[: -(-n // size)] for table, n in zip(self.tables, lens, strict=True)]
        self.pages = np.concatenate(tables)
        self.indptr = np.cumsum([0, *map(len, tables)])
        self.last = [(n - 1) % size + 1 if n else 0 for n in lens]
        self.in_host, self.slots = self._host[self.pages], self._slot[self.pages]

    @property
    def heads(self) -> tuple[int, int, int, int]:
        step = self.step
        return (step.num_kv_heads * step.group, step.num_kv_heads, step.head_dim, step.page_size)

    def plan(self, way: Any) -> None:
        options = {
            "in_host": self.in_host, "window_left": self.step.window_left, "q_data_type": self.dtype,
            "o_data_type": torch.float32,
        }  # fmt: skip
        if type(way).__name__ == "StreamedDecode":
            way.plan(self.indptr, self.slots, self.last, *self.heads, **options)
        else:
            way.plan(self.queries, self.indptr, self.slots, self.last, *self.heads, **options)

    def want(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = shape_of(*self.heads, None, True, self.step.window_left, None, self.dtype, torch.float32)
        decode = all(width == 1 for width in self.step.widths)  # then a sequence may be empty
        table = Paging.of(None if decode else self.queries, self.indptr, self.pages, self.last, shape)
        return attend(self.q[layer], self.whole[:, layer], table, torch.float64)

    def require_right(self, way: Any, layers: Sequence[int] = range(LAYERS)) -> None:
        for layer in layers:
            out, lse = way.run(self.q[layer], self.hbm[:, layer], layer, return_lse=True)
            want, want_lse = self.want(layer)
            blind = want_lse == -torch.inf
            assert torch.equal(lse == -torch.inf, blind)
            error = (out.double() - want).norm() / want.norm().clamp_min(1e-30)
            tolerance = TOLERANCE[self.dtype]
            assert float(error) <= tolerance, f"relative error {float(error):.2e} in layer {layer}"
            torch.testing.assert_close(lse[~blind].double(), want_lse[~blind], rtol=1e-5, atol=1e-4)


@st.composite
def steps(draw: st.DrawFn, decode: bool) -> Step:
    prefixes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=3))
    count = draw(st.integers(1, 5))
    of = [draw(st.integers(0, len(prefixes) - 1)) for _ in range(count)]
    page_size = draw(st.sampled_from([1, 4, 6]))
    own = [draw(st.integers(0, 25)) for _ in range(count)]
    widths = [1] * count
    if not decode:
        lens = [prefixes[i] * page_size + n for i, n in zip(of, own, strict=True)]
        widths = [draw(st.integers(0, min(20, length))) for length in lens]
    return Step(
        prefixes, of, own, widths,
        page_size=page_size,
        num_kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3])),
        window_left=draw(st.sampled_from([-1, -1, 0, 7])),
        rows=draw(st.integers(1, 5)),
        slabs=draw(st.sampled_from([4, 5, 9])),
        share=draw(st.sampled_from([0.0, 0.3, 0.8, 1.0])),
        seed=draw(st.integers(0, 1000)),
    )  # fmt: skip


@given(step=steps(decode=True))
@settings(max_examples=lanes.examples(25, 400), deadline=None)
def test_decoding_is_exact_for_any_mix_of_pools(step: Step) -> None:
    scene = Scene(step)
    way = StreamedDecode(scene.stream)
    for _ in range(2):
        scene.plan(way)
        scene.require_right(way)


@given(step=steps(decode=False))
@settings(max_examples=lanes.examples(25, 400), deadline=None)
def test_prefill_is_exact_for_any_mix_of_pools(step: Step) -> None:
    scene = Scene(step)
    way = StreamedPrefill(scene.stream)
    for _ in range(2):
        scene.plan(way)
        scene.require_right(way)


@given(step=steps(decode=True) | steps(decode=False))
@settings(max_examples=lanes.examples(3, 60), deadline=None)
def test_kernels_of_the_gpu_are_exact_for_any_mix_of_pools(step: Step) -> None:
    scene = Scene(step)
    way = StreamedPrefill(scene.stream, backend="triton", kernels=KERNELS_HERE)
    if all(width <= length for width, length in zip(step.widths, scene.lens, strict=True)):
        scene.plan(way)
        scene.require_right(way)


DOCUMENT = Step([9], [0, 0, 0], [5, 1, 8], [1, 1, 1], share=0.8, seed=1)
"""Three questions on one document."""

CHUNK = Step([0, 8], [1, 0], [9, 14], [6, 11], share=0.5, seed=2)
"""Chunks of two prompts, the second of which has no prefix in common with the first."""


ONE = Step([9], [0], [5], [1], share=0.8, seed=1)
"""One question on a document: every pass has all queries, so the last pass stores the result."""


@pytest.mark.parametrize("step", [ONE, DOCUMENT, CHUNK], ids=["question", "questions", "prompts"])
def test_kernels_of_the_gpu_merge_partial_results(step: Step) -> None:
    require_exact(streamed, step, KERNELS_HERE)


@pytest.mark.parametrize("kernels", [None, KERNELS_HERE], ids=["reference", "kernels"])
def test_queries_that_see_no_key_in_the_first_passes_get_only_what_they_see_later(
    kernels: ModuleType | None,
) -> None:
    out, lse = torch.empty(2, 1, 8), torch.empty(2, 1)
    sums = streamed._Sums(out, lse, 3, kernels)
    blind, seen = torch.full((2, 1), -torch.inf), torch.tensor([[-torch.inf], [2.0]])
    for logarithms in (blind, blind, seen):
        found = torch.zeros(2, 1, 8)
        found[logarithms[:, 0] > -torch.inf] = 5.0
        sums.add(found, logarithms, None)
    assert out[:, 0].tolist() == [[0.0] * 8, [5.0] * 8]
    assert torch.equal(lse, seen)


def test_memory_that_passes_share_fits_the_largest_of_them() -> None:
    parts, room, cpu = Parts(), Room(), torch.device("cpu")
    for rows in (2, 5, 1):
        parts.reserve(rows, 8, cpu)
        room.reserve(rows, torch.float32, 3 * rows, cpu)
    assert (len(parts.logarithms), len(parts.results)) == (5, 40)
    assert (len(room.planes), len(room.sums)) == (5, 15)


def test_passes_with_many_queries_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []

    def choose(device: torch.device, asked: str, table: Paging) -> str:
        half = replace(table, shape=replace(table.shape, dtype=torch.bfloat16))
        used.append("gathered" if gathered.fits(half) else "triton")
        return used[-1]

    monkeypatch.setattr(streamed, "for_many", choose)
    monkeypatch.setattr(gathered, "sdpa", plain_sdpa)
    for step in (CHUNK, FRAGMENTS):
        require_exact(streamed, step, KERNELS_HERE)
    assert set(used) == {"gathered", "triton"}


def require_exact(module: ModuleType, step: Step, kernels: ModuleType | None = None) -> None:
    scene = Scene(step)
    way = module.StreamedPrefill(
        scene.stream, backend="reference" if kernels is None else "triton", kernels=kernels
    )
    for _ in range(2):
        scene.plan(way)
        scene.require_right(way)


@pytest.mark.parametrize("codec", ["int8", "fp8", "int4"])
def test_encoded_pages_are_decoded_layer_by_layer(codec: str) -> None:
    scene = Scene(replace(DOCUMENT, codec=codec, page_size=16, head_dim=16))
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    scene.require_right(way)
    scene.stream.check()


def damaged(share: float, slabs: int = 3) -> tuple[Scene, int, NDArray[np.uint8]]:
    """Return a scene in which the payload of a page in host memory is damaged, its slot, and the payload before."""
    scene = Scene(replace(DOCUMENT, codec="int8", page_size=16, head_dim=16, share=share, slabs=slabs))
    slot = int(scene.slots[scene.in_host][0])
    before = scene.arena.view(slot).copy()
    scene.arena.view(slot)[:] = 0xFF
    return scene, slot, before


def test_page_that_cannot_be_decoded_is_reported_with_its_slot_and_never_replaced_by_another() -> None:
    scene, slot, _ = damaged(share=1.0)
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    for layer in range(LAYERS):
        out = way.run(scene.q[layer], scene.hbm[:, layer], layer)
        assert isinstance(out, torch.Tensor)
        readers = [i for i in range(3) if slot in scene.slots[scene.indptr[i] : scene.indptr[i + 1]]]
        assert out[readers].isnan().all()
    with pytest.raises(IntegrityError, match=rf"in the host slots \[{slot}\]: discard the results"):
        scene.stream.check()


def test_a_damaged_page_that_was_copied_ahead_is_not_read_after_it_was_reported() -> None:
    scene, slot, before = damaged(share=1.0, slabs=40)  # the ring holds several steps
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    scene.stream._ring.stream.synchronize()
    with pytest.raises(IntegrityError, match="not valid payloads"):
        scene.stream.check()
    with pytest.raises(ValueError, match=r"the stream was released after plan\(\)"):
        way.run(scene.q[0], scene.hbm[:, 0], 0)
    scene.arena.view(slot)[:] = before
    scene.plan(way)
    scene.require_right(way)
    scene.stream.check()


@pytest.mark.parametrize("seed", lanes.seeds(3, 30))
def test_decoding_stays_exact_while_sequences_grow_and_pages_move_between_the_pools(seed: int) -> None:
    walk(streamed, seed)


def walk(module: ModuleType, seed: int) -> None:
    """Decode with growing sequences while pages move between the pools, and compare each step with the reference."""
    chance = random.Random(seed)
    scene = Scene(replace(DOCUMENT, own=(21, 17, 24), seed=seed, share=chance.choice([0.4, 0.9])))
    ways = [module.StreamedDecode(scene.stream), module.StreamedPrefill(scene.stream)]
    way = ways[0]
    lens = [40, 44, 38]
    for _ in range(10):
        act = chance.choice(["grow", "move", "restart", "other"])
        if act == "move":
            # The slots of released pages get other pages.
            scene.stream.release().synchronize()
            scene.place(chance.random())
        elif act == "restart":
            lens = [chance.randint(1, length) for length in scene.whole_lens]
        elif act == "other":
            way = chance.choice(ways)
        lens = [min(n + 1, most) for n, most in zip(lens, scene.whole_lens, strict=True)]
        scene.set_lens(lens)
        scene.plan(way)
        layers = chance.choice([range(LAYERS), [2, 0], [1, 1, 2]])
        scene.require_right(way, layers)


def require_shared(module: ModuleType) -> None:
    """Run two plans of different lengths in turn, on one stream."""
    scene = Scene(replace(DOCUMENT, share=0.9, own=(21, 17, 24)))
    ways = [module.StreamedDecode(scene.stream), module.StreamedPrefill(scene.stream)]
    for way, lens in zip(ways, ([40, 44, 60], [12, 50, 38]), strict=True):
        scene.set_lens(lens)
        scene.plan(way)
    for way, lens in zip([*ways, *ways], ([40, 44, 60], [12, 50, 38]) * 2, strict=True):
        scene.set_lens(lens)
        scene.require_right(way)


def require_replanned(module: ModuleType) -> None:
    """Plan again after changes that leave most of the plan as it was."""
    scene = Scene(Step([0], [0, 0], [24, 24], [5, 5], seed=3))
    way = module.StreamedPrefill(scene.stream)
    number = np.arange(scene.total)
    some = (number % 6 < 5) & (number > 1)
    # The last page of each sequence and the first two pages are in HBM.
    for lens, host, slots in (
        ((24, 24), some, number),
        ((21, 22), some, number),  # fewer tokens in the same pages
        ((23, 24), some, number),  # more tokens in the same pages
        ((24, 24), some, number),
        ((24, 24), some, number[::-1]),  # other slots
        ((24, 24), some & (number != 2), number[::-1]),  # one page less in host memory
        ((24, 24), number == 0, number % 6),  # another page of another sequence in the same host slot
        ((24, 24), number == 6, number % 6),
    ):
        scene.stream.release().synchronize()
        scene.put(host, slots if len(set(slots)) == len(slots) else np.where(host, slots, number))
        scene.set_lens(lens)
        scene.plan(way)
        scene.require_right(way)


def test_plans_follow_small_changes() -> None:
    require_replanned(streamed)


def require_other_readers(module: ModuleType) -> None:
    """Plan the same streamed pages again for other numbers of queries, with a window, and for another sequence."""
    scene = Scene(replace(CHUNK, share=1.0))
    way = module.StreamedPrefill(scene.stream)
    for queries, window in (([0, 6, 17], -1), ([0, 11, 17], -1), ([0, 11, 17], 7)):
        scene.queries, scene.step = np.array(queries), replace(scene.step, window_left=window)
        scene.plan(way)
        scene.require_right(way)
    scene = Scene(Step([0], [0, 0], [20, 20], [1, 1], share=0.3, seed=3))
    way = module.StreamedDecode(scene.stream)
    host, resident = np.flatnonzero(scene._host)[:1], np.flatnonzero(~scene._host)[:4]
    # The page in host memory is at the same place in the table and stays whole, but then belongs to the first sequence.
    for own, indptr, last in ((resident[2:3], [0, 2, 4], [4, 2]), (resident[2:], [0, 3, 5], [4, 3])):
        scene.pages, scene.indptr = np.concatenate([resident[:2], host, own]), np.array(indptr)
        scene.last, scene.slots, scene.in_host = last, scene._slot[scene.pages], scene._host[scene.pages]
        scene.plan(way)
        scene.require_right(way)


def test_streamed_pages_are_planned_again_if_their_readers_change() -> None:
    require_other_readers(streamed)


def test_two_plans_may_share_a_stream() -> None:
    require_shared(streamed)


def test_a_plan_without_pages_in_host_memory_leaves_the_copies_ahead_for_others() -> None:
    scene = Scene(replace(DOCUMENT, share=1.0))
    way, other = StreamedDecode(scene.stream), StreamedDecode(scene.stream)
    for _ in range(2):
        scene.plan(way)
        other.plan(
            [0, 1],
            [0],
            [4],
            *scene.heads,
            in_host=[False],
            q_data_type=torch.float32,
            o_data_type=torch.float32,
        )
        for layer in range(LAYERS):
            scene.require_right(way, [layer])
            # The stream has chunks, but none of them belong to this plan.
            out = other.run(scene.q[layer, :1], scene.whole[:, layer], layer)
            shape = shape_of(*scene.heads, None, True, -1, None, torch.float32, None)
            table = Paging.of(None, [0, 1], [0], [4], shape)
            torch.testing.assert_close(out, attend(scene.q[layer, :1], scene.whole[:, layer], table)[0])
    assert scene.stream.restarts == 0


def test_a_plan_whose_pages_are_all_in_hbm_again_ends_its_copies_ahead() -> None:
    scene = Scene(replace(DOCUMENT, share=1.0))
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    assert scene.stream.chunks
    scene.place(0.0)
    scene.set_lens(scene.lens)
    scene.plan(way)
    assert not scene.stream.chunks
    scene.require_right(way)


def test_shared_pages_are_streamed_once_per_layer_for_all_questions() -> None:
    scene = Scene(replace(DOCUMENT, share=1.0, own=(1, 1, 1)))
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    assert way.streamed_pages == 9 + 3
    scene.require_right(way)


@pytest.mark.parametrize("share", [0.0, 0.7, 1.0])
def test_a_batch_may_shrink_and_grow_from_plan_to_plan(share: float) -> None:
    scene = Scene(replace(DOCUMENT, share=share, own=(5, 1, 8)))
    ways: list[Any] = [StreamedDecode(scene.stream), StreamedPrefill(scene.stream)]
    for count in (3, 2, 1, 3, 0, 2):
        indptr = scene.indptr[: count + 1]
        pages = slice(0, indptr[-1])
        options: dict[str, Any] = {
            "in_host": scene.in_host[pages], "q_data_type": torch.float32, "o_data_type": torch.float32,
        }  # fmt: skip
        for way, first in zip(ways, ((), (range(count + 1),)), strict=True):
            way.plan(*first, indptr, scene.slots[pages], scene.last[:count], *scene.heads, **options)
            for layer in range(LAYERS):
                out = way.run(scene.q[layer, :count], scene.hbm[:, layer], layer)
                want = scene.want(layer)[0][:count]
                assert isinstance(out, torch.Tensor)
                torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)


def test_passes_over_chunks_that_have_not_changed_are_not_planned_again() -> None:
    scene = Scene(replace(DOCUMENT, share=1.0, own=(1, 1, 1)))
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    assert way._streamed is not None
    before = way._streamed
    scene.plan(way)
    assert way._streamed is before
    scene.set_lens([37, 35, 36])  # the ninth page is no longer seen by all queries
    scene.plan(way)
    now = way._streamed.passes
    assert [a is b for a, b in zip(before.passes, now, strict=False)] == [True] * 8 + [False, True]
    scene.require_right(way)


def test_queries_that_see_the_same_pages_are_packed_into_one_sequence() -> None:
    scene = Scene(replace(DOCUMENT, share=0.0))
    shape = shape_of(*scene.heads, None, True, -1, None, torch.float32, None)
    table = Paging.of(None, scene.indptr, scene.slots, scene.last, shape)
    found = divide(table, scene.in_host, 2)
    assert not found.chunks
    together, apart = found.resident
    assert together.queries is None
    assert (together.table.batch, together.table.num_queries, len(together.table.indices)) == (1, 3, 9)
    assert (apart.table.batch, apart.table.num_queries, len(apart.table.indices)) == (3, 3, 2 + 1 + 2)


def test_a_window_streams_only_the_pages_that_it_reaches() -> None:
    scene = Scene(replace(DOCUMENT, share=1.0, own=(3, 3, 3), window_left=6))
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    assert way.streamed_pages == 1 + 3
    scene.require_right(way)


def test_run_after_a_release_is_refused_until_the_next_plan() -> None:
    scene = Scene(DOCUMENT)
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    scene.stream.release()
    with pytest.raises(ValueError, match=r"the stream was released after plan\(\)"):
        way.run(scene.q[0], scene.hbm[:, 0], 0)
    scene.plan(way)
    scene.require_right(way)


@pytest.mark.parametrize(
    ("changed", "what"),
    [
        ({"in_host": [True]}, "in_host must be one bool for each of the 32 indices"),
        ({"in_host": np.zeros(32)}, "in_host must be one bool"),
        ({"layers": [0, 0]}, "layers must be different integers from 0 to 2"),
        ({"layers": [3]}, "layers must be different integers from 0 to 2"),
        ({"q_data_type": torch.bfloat16}, "q_data_type must be torch.float32"),
    ],
)
def test_impossible_plans_are_refused(changed: dict[str, Any], what: str) -> None:
    scene = Scene(DOCUMENT)
    way = StreamedDecode(scene.stream)
    right = {"in_host": scene.in_host, "q_data_type": torch.float32}
    with pytest.raises(ValueError, match=what):
        way.plan(scene.indptr, scene.slots, scene.last, *scene.heads, **{**right, **changed})
    with pytest.raises(ValueError, match="no plan yet"):
        way.run(scene.q[0], scene.hbm[:, 0], 0)


@pytest.mark.parametrize("slot", [-1, 999])
def test_host_slots_that_do_not_exist_are_refused_and_later_plans_still_work(slot: int) -> None:
    scene = Scene(DOCUMENT)
    way = StreamedDecode(scene.stream)
    slots = scene.slots.copy()
    slots[np.flatnonzero(scene.in_host)[0]] = slot
    with pytest.raises(ValueError, match=f"host slot must be 0 to {scene.arena.num_slots - 1}, got {slot}"):
        way.plan(
            scene.indptr, slots, scene.last, *scene.heads, in_host=scene.in_host, q_data_type=torch.float32
        )
    scene.plan(way)
    scene.require_right(way)
    scene.stream.close()


@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_each_entry_counts_if_sequences_contain_a_page_several_times_and_at_different_positions(
    share: float,
) -> None:
    scene = Scene(replace(DOCUMENT, share=share))
    # The first page is also the third, and the second page of the first sequence is the first one of the second.
    pages = scene.pages.copy()
    pages[2], pages[scene.indptr[1]] = pages[0], pages[1]
    scene.pages, scene.slots, scene.in_host = pages, scene._slot[pages], scene._host[pages]
    for way in (StreamedDecode(scene.stream), StreamedPrefill(scene.stream)):
        scene.plan(way)
        scene.require_right(way)


def test_pages_in_hbm_must_have_as_many_planes_as_pages_in_host_memory() -> None:
    scene = Scene(DOCUMENT)
    way = StreamedDecode(scene.stream)
    scene.plan(way)
    with pytest.raises(
        ValueError, match="paged_kv_cache must have 2 planes, as the pages of the stream, got 1"
    ):
        way.run(scene.q[0], scene.hbm[:, 0, :1], 0)


def test_layers_that_were_not_planned_are_refused() -> None:
    scene = Scene(DOCUMENT)
    way = StreamedDecode(scene.stream)
    way.plan(
        scene.indptr, scene.slots, scene.last, *scene.heads,
        in_host=torch.from_numpy(scene.in_host), layers=[0, 2], q_data_type=torch.float32, o_data_type=torch.float32,
    )  # fmt: skip
    scene.require_right(way, [0, 2, 0])
    with pytest.raises(ValueError, match=r"one of the planned layers \[0, 2\], got 1"):
        way.run(scene.q[1], scene.hbm[:, 1], 1)


FRAGMENTS = Step([3], [0, 0], [17, 9], [9, 4], page_size=2, share=0.5, seed=5)
"""Queries whose own tokens are in many pages of both pools."""

BUGS = [
    Bug(
        "a pass over streamed pages is left out",
        "for one in self._streamed.passes[chunk]:",
        "for one in self._streamed.passes[chunk][1:]:",
    ),
    Bug(
        "the first pass is overwritten", "if not first:\n            states", "if False:\n            states"
    ),
    Bug("packed queries do not see all pages", "int(table.widths[readers].sum()), end", "0, end"),
    Bug("whole pages come before any run", "table.shape.page_size >= int(table.widths[sequence])", "0 >= 0"),
    Bug(
        "pages with the queries' own tokens count as whole",
        "(table.kv_lens - table.widths)[sequence] + 1",
        "table.kv_lens[sequence]",
    ),
    Bug("the result is overwritten by the sum before the last pass", "            last &= not direct\n", ""),
    Bug("a plan is kept although its shape has changed", "old.shape != table.shape or not (", "not ("),
    Bug(
        "a plan is kept although its queries have changed",
        "np.array_equal(old.qo_indptr, table.qo_indptr)\n            and ",
        "",
    ),
    Bug(
        "a plan is kept although a page belongs to another sequence",
        "and np.array_equal(old.indptr, table.indptr)",
        "",
    ),
    Bug("a plan is kept although its sequences have grown", "and bool(self.entries.whole.all())", ""),
    Bug(
        "a plan is kept although its sequences are shorter",
        "and bool((table.kv_lens >= old.kv_lens).all())",
        "",
    ),
    Bug("a plan is kept although its pages have moved", "and np.array_equal(self.slots, slots)", ""),
    Bug("a plan is kept although other pages stream", "and np.array_equal(self.positions, positions)", ""),
    Bug(
        "passes are kept although they have changed",
        "was is not None and _equal(was, each)",
        "was is not None",
    ),
    Bug(
        "another plan's chunks are read",
        "if self._streamed.chunks and not self._follows():",
        "if not self._stream.chunks:",
    ),
    Bug(
        "the tokens before a run are not counted", "[before, slots]), whole + left", "[before, slots]), left"
    ),
]


@pytest.mark.deep
@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_planted_bug_is_noticed(bug: Bug) -> None:
    planted = planting.load(streamed, bug)

    def require_all() -> None:
        for step in (DOCUMENT, CHUNK, *(replace(FRAGMENTS, seed=seed) for seed in range(8))):
            require_exact(planted, step)
        require_shared(planted)
        require_replanned(planted)
        require_other_readers(planted)
        for seed in range(12):
            walk(planted, seed)
        require_exact(planted, ONE, KERNELS_HERE)

    with pytest.raises((AssertionError, IndexError)):
        require_all()
