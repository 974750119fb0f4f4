"""Measures attention over contexts larger than HBM. The pages beyond HBM stream from host memory in every step.

Only attention is computed, for the KV shape of an 8B model with random K, V and queries. The rate of the link is that
of contiguous copies from page-locked memory in the same process. There are four parts:

- ``one``: one sequence decodes. The roofline is the time in which the link copies the bytes that are not in HBM.
- ``questions``: many sequences (questions) share a document. Each streamed page is copied once for all of them. They
  are compared with attention over pages that are all in HBM, in three ways: each question has a document of its own
  (``apart``), each question reads the same document itself, often from the GPU's cache (``same_slots``), and all
  questions read the document together (``shared``).
- ``long`` and ``int8``: one sequence decodes 16 tokens over a context that needs most of host memory.

The ring counts towards the HBM for pages. Errors are relative to attention over pages that are all in HBM, unless
their names say that they are relative to float64.

    python -m benchmarks.streamed_attention --part one --json
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

import numpy as np
import torch
from typer import BadParameter, Option, echo
from typer import run as typer_run

from tierstore.bench.link import Ceiling, locked_arena, settle
from tierstore.bench.measurement import at_rest
from tierstore.bench.measurement import device as processor
from tierstore.cli.output import print_json
from tierstore.codecs.host_format import Packer
from tierstore.gpu.attention.backends import attend
from tierstore.gpu.attention.page_stream import RING_NBYTES, SLAB_NBYTES, PageStream
from tierstore.gpu.attention.paged import PagedDecode
from tierstore.gpu.attention.streamed import StreamedDecode
from tierstore.gpu.copy_routes import own_pool_route
from tierstore.gpu.driver import Driver
from tierstore.gpu.pool import CudaPool
from tierstore.gpu.quant.encoded_routes import encoded_route
from tierstore.page import PageLayout, PageSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from tierstore.gpu.copy_routes import Route

PARTS = ("one", "questions", "long", "int8")
_LINK_NBYTES = 512 << 20
_SAVED = 32
"""Pages that are copied to host memory at a time."""


class Sizes(NamedTuple):
    """The shape of attention, and the sizes of the ring."""

    layers: int
    page_size: int
    heads: int
    kv_heads: int
    head_dim: int
    ring_nbytes: int
    slab_nbytes: int

    @property
    def spec(self) -> PageSpec:
        """Return the specification of the pages."""
        return PageSpec(
            num_layers=self.layers, page_size=self.page_size, num_kv_heads=self.kv_heads,
            head_dim=self.head_dim, dtype="bfloat16", model="streamed-attention",
        )  # fmt: skip

    @property
    def plan(self) -> tuple[int, int, int, int]:
        """Return the arguments of ``plan`` that describe the shape."""
        return (self.heads, self.kv_heads, self.head_dim, self.page_size)


class Bed:
    """Random pages of a document in host memory and in HBM, and a page stream.

    Page i has the content of the random page ``i % len(contents)``. The first ``hosts`` pages are in host memory, and
    the last ``resident`` pages in HBM. Pages may be in both.
    """

    def __init__(
        self, name: str, sizes: Sizes, pages: int, hosts: int, resident: int, distinct: int, codec: str
    ) -> None:
        """Create the pages. At most ``distinct`` of them have different contents.

        Raises:
            ConfigError: The device does not exist, or memory cannot be page-locked.
        """
        self.sizes, self.layout = sizes, PageLayout.of(sizes.spec)
        self.pages, self.hosts, self._distinct = pages, hosts, min(distinct, pages)
        self._first = pages - resident
        self.device = torch.device(name)
        self.arena = locked_arena(name, self.layout, hosts, codec)
        self._host_slots = np.random.default_rng(0).permutation(hosts)
        contents = self.contents()
        self._save(contents)
        number = torch.arange(self._first, pages, device=self.device) % self._distinct
        self.resident = self.pages_of(contents).index_select(0, number)
        del contents
        self.stream = PageStream.open(
            self.arena, name, ring_nbytes=sizes.ring_nbytes, slab_nbytes=sizes.slab_nbytes
        )

    def contents(self) -> Any:
        """Return the different pages, the same ones in every call: a pool on a GPU, a tensor on the CPU."""
        torch.manual_seed(0)
        if self.device.type == "cuda":
            pool: Any = CudaPool(self.layout, self._distinct, self.device)
        else:
            pool = torch.empty(self._distinct, *self.sizes.spec.shape, dtype=torch.bfloat16)
        pages = self.pages_of(pool)
        for first in range(0, len(pages), 64):
            pages[first : first + 64].normal_()
        return pool

    @staticmethod
    def pages_of(contents: Any) -> torch.Tensor:
        """Return the pages in the result of ``contents``."""
        found = contents.pages if isinstance(contents, CudaPool) else contents
        assert isinstance(found, torch.Tensor)
        return found

    def whole(self, contents: Any, layer: int) -> torch.Tensor:
        """Return a layer of all pages: first the different ones, then those in HBM."""
        return torch.cat([self.pages_of(contents)[:, layer], self.resident[:, layer]])

    def whole_slots(self, split: int) -> NDArray[np.int64]:
        """Return the slots in the result of ``whole`` if the first ``split`` pages are streamed."""
        hosts = np.arange(split) % self._distinct
        return np.concatenate([hosts, self._distinct + np.arange(split, self.pages) - self._first])

    def slots(self, split: int) -> NDArray[np.int64]:
        """Return the slots of all pages in the two pools: host slots for the first ``split`` pages, then HBM slots."""
        return np.concatenate([self._host_slots[:split], np.arange(split, self.pages) - self._first])

    def nbytes(self, split: int) -> int:
        """Return the number of bytes that cross the link in a step that streams ``split`` pages."""
        return split * self.arena.held.payload_nbytes

    def close(self) -> None:
        """Release all memory."""
        self.stream.close()
        self.arena.close()

    def _save(self, contents: Any) -> None:
        numbers = np.arange(self.hosts) % self._distinct
        if self.device.type == "cpu":
            packer = Packer(self.arena.held) if self.arena.held.encoded else None
            for number, slot in zip(numbers, self._host_slots, strict=True):
                page = contents[number].view(torch.uint8).numpy().reshape(-1)
                view = self.arena.view(int(slot))
                if packer is None:
                    view[: len(page)] = page
                elif not packer.pack(page, view):
                    raise RuntimeError("the codec cannot encode a random page")
            return
        driver = Driver(self.device.index or 0)
        device = torch.device("cuda", self.device.index or 0)
        route: Route | str = (
            encoded_route(contents, self.arena.held, driver, device)
            if self.arena.held.encoded
            else own_pool_route(contents, self.layout, driver, device)
        )
        if isinstance(route, str):
            raise RuntimeError(f"the GPU cannot encode pages: {route}")
        settle(device)
        stream = driver.stream(device.index)
        for first in range(0, self.hosts, _SAVED):
            part = slice(first, first + _SAVED)
            route.save(numbers[part], self.arena.addresses(self._host_slots[part]), stream)
            if first % (16 * _SAVED) == 0:
                settle(device)
        settle(device)


class Link:
    """The rate of contiguous copies to the device, measured between other measurements."""

    def __init__(self, name: str, nbytes: int) -> None:
        """Allocate the memory to copy."""
        self._ceiling = Ceiling(name, nbytes)
        self._found: list[float] = []
        self._ceiling.gbps("h2d")

    def measure(self) -> None:
        """Copy three times."""
        self._found += [self._ceiling.gbps("h2d") for _ in range(3)]

    @property
    def gbps(self) -> float:
        """Return the median rate in GB/s (10^9 bytes/s)."""
        return median(self._found)


def _timed(device: torch.device, act: Callable[[], object]) -> float:
    start = perf_counter()
    act()
    settle(device)
    return perf_counter() - start


def _recorded(device: torch.device, act: Callable[[], object]) -> Callable[[], object]:
    """Record ``act`` as a CUDA graph, and return a function that replays it. On the CPU, return ``act``."""
    act()
    if device.type != "cuda":
        return act
    settle(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        act()
    graph.replay()
    settle(device)
    return graph.replay


def _error(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found.double() - want.double()).norm() / want.double().norm())


def _memory(device: torch.device) -> dict[str, float]:
    """Return the peak use of HBM since the last reset, and of host memory by this process, in GiB."""
    found = {"peak_host_gib": getrusage(RUSAGE_SELF).ru_maxrss / (1 << 20)}
    if device.type == "cuda":
        found["peak_hbm_gib"] = torch.cuda.max_memory_allocated(device) / (1 << 30)
    return found


def decode(
    name: str, sizes: Sizes, tokens: int, hbm: int, steps: int, distinct: int, codec: str, link: Link
) -> dict[str, object]:
    """Measure decoding with one sequence whose last step has ``tokens`` tokens, with HBM for ``hbm`` tokens."""
    size = sizes.page_size
    pages = -(-tokens // size)
    page_nbytes = sizes.spec.page_nbytes
    resident = hbm // size - -(-sizes.ring_nbytes // page_nbytes)
    begun = perf_counter()
    split = pages - resident
    bed = Bed(name, sizes, pages, split, resident, distinct, codec)
    prepared_s = perf_counter() - begun
    device = bed.device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    way = StreamedDecode(bed.stream)
    q = torch.randn(sizes.layers, 1, sizes.heads, sizes.head_dim, device=device).to(torch.bfloat16)
    outs = torch.empty(q.shape, dtype=torch.float32, device=device)
    lses = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
    in_host, slots = np.arange(pages) < split, bed.slots(split)
    submitted: list[float] = []

    def step(length: int) -> None:
        start = perf_counter()
        used = -(-length // size)
        way.plan(
            [0, used], slots[:used], [(length - 1) % size + 1], *sizes.plan, in_host=in_host[:used],
            o_data_type=torch.float32,
        )  # fmt: skip
        for layer in range(sizes.layers):
            way.run(q[layer], bed.resident[:, layer], layer, out=outs[layer], lse=lses[layer])
        submitted.append(perf_counter() - start)

    link.measure()
    with at_rest():
        first_s = _timed(device, partial(step, tokens - steps - 1))
        step(tokens - steps)
        settle(device)
        seconds = [_timed(device, partial(step, tokens - steps + 1 + at)) for at in range(steps)]
    bed.stream.check()
    memory = _memory(device)
    link.measure()
    nbytes = bed.nbytes(split)
    roofline_s = nbytes / link.gbps / 1e9
    mean_s = sum(seconds) / steps
    report: dict[str, object] = {
        "tokens": tokens,
        "hbm_tokens": hbm,
        "codec": codec,
        "streamed_tokens": split * size,
        "ring_mib": bed.stream.nbytes >> 20,
        "streamed_gb": nbytes / 1e9,
        "link_gbps": link.gbps,
        "roofline_ms": roofline_s * 1e3,
        "first_step_ms": first_s * 1e3,
        "step_ms": mean_s * 1e3,
        "steps_ms": [round(each * 1e3, 2) for each in seconds],
        "submit_ms": median(submitted[2:]) * 1e3,
        "of_roofline": roofline_s / mean_s,
        "of_roofline_median": roofline_s / median(seconds),
        "tokens_per_s": 1 / mean_s,
        "restarts": bed.stream.restarts,
        "prepared_s": prepared_s,
        **memory,
    }
    # The same attention with all pages in HBM.
    contents = bed.contents()
    whole = PagedDecode(device)
    last = [(tokens - 1) % size + 1]
    whole.plan([0, pages], bed.whole_slots(split), last, *sizes.plan, o_data_type=torch.float32)
    errors, times = [], []
    for layer in range(sizes.layers):
        these = bed.whole(contents, layer)
        out: Any = whole.run(q[layer], these)
        errors.append(_error(outs[layer], out))
        times.append(_timed(device, partial(whole.run, q[layer], these)))
    # Both results contain rounding errors. Those of the last layer are also compared with float64.
    exact, _ = attend(q[-1], these, whole.planned, torch.float64)
    bed.close()
    return report | {
        "worst_error": max(errors),
        "error_to_float64": _error(outs[-1], exact),
        "in_hbm_error_to_float64": _error(out, exact),
        "in_hbm_ms": sum(times) * 1e3,
    }


class Apart:
    """Attention in which each sequence reads a document and a page of its own, with all pages in HBM.

    If HBM has no room for a copy of the document for each sequence, fewer sequences are measured, and the time is
    scaled to the number of sequences.
    """

    def __init__(self, bed: Bed, pages: int, most: int) -> None:
        """Allocate as many copies of the document as fit into three quarters of the free memory, at most ``most``."""
        self._bed, self._pages = bed, pages + 1
        nbytes = self._pages * bed.sizes.spec.page_nbytes
        free = 4 * nbytes if bed.device.type == "cpu" else torch.cuda.mem_get_info(bed.device)[0]
        self.copies = max(1, min(most, free * 3 // 4 // nbytes))
        shape = (self.copies * self._pages, *bed.sizes.spec.shape)
        self._whole = torch.empty(shape, dtype=torch.bfloat16, device=bed.device)
        for first in range(0, len(self._whole), 64):
            self._whole[first : first + 64].normal_()
        self._slots = np.random.default_rng(1).permutation(len(self._whole))
        self._found: dict[int, float] = {}

    def seconds(self, count: int, steps: int) -> float:
        """Return the time of a step with ``count`` sequences."""
        measured = min(count, self.copies)
        if measured not in self._found:
            self._found[measured] = self._measure(measured, steps)
        return self._found[measured] * count / measured

    def _measure(self, count: int, steps: int) -> float:
        sizes, device = self._bed.sizes, self._bed.device
        slots = self._slots[: count * self._pages]
        way = PagedDecode(device, max_pages=len(slots))
        indptr, last = np.arange(count + 1) * self._pages, [sizes.page_size // 2] * count
        way.plan(indptr, slots, last, *sizes.plan, o_data_type=torch.float32)
        q = torch.randn(sizes.layers, count, sizes.heads, sizes.head_dim, device=device).to(torch.bfloat16)
        out = torch.empty(q.shape[1:], dtype=torch.float32, device=device)

        def act() -> None:
            for layer in range(sizes.layers):
                way.run(q[layer], self._whole[:, layer], out=out)

        replay = _recorded(device, act)
        return median(_timed(device, replay) for _ in range(steps))


def questions(
    name: str, sizes: Sizes, tokens: int, hbm: int, counts: Sequence[int], steps: int, link: Link
) -> dict[str, object]:
    """Measure decoding with many questions on one document of ``tokens`` tokens, with HBM for ``hbm`` tokens.

    Each question has a page of its own, in HBM.
    """
    pages, most, rows = tokens // sizes.page_size, max(counts), []
    resident = hbm // sizes.page_size - -(-sizes.ring_nbytes // sizes.spec.page_nbytes)
    # Every question takes a page from the document. All pages that may be in HBM are there, but not all are used.
    hosts = min(pages, pages + most - resident)
    bed = Bed(name, sizes, pages + most, hosts, min(pages, resident) + most, pages + most, "none")
    contents = bed.contents()
    apart = Apart(bed, pages, most)
    for count in counts:
        split = min(pages, pages + count - resident)
        row = _asked(bed, contents, pages, split, count, steps, link)
        apart_s = apart.seconds(count, steps)
        row |= {
            "apart_ms": round(apart_s * 1e3, 2),
            "of_apart": round(apart_s * 1e3 / row["streamed_ms"], 4),
            "tokens_per_s_apart": round(count / apart_s, 2),
        }
        rows.append(row)
        echo(f"{row}", err=True)
    bed.close()
    return {
        "tokens": tokens,
        "hbm_tokens": hbm,
        "ring_mib": bed.stream.nbytes >> 20,
        "link_gbps": link.gbps,
        "documents_in_hbm": apart.copies,
        "rows": rows,
        **_memory(bed.device),
    }


def _asked(
    bed: Bed, contents: Any, pages: int, split: int, count: int, steps: int, link: Link
) -> dict[str, float]:
    sizes, device = bed.sizes, bed.device
    own = np.arange(pages, pages + count)
    table = np.concatenate([np.concatenate([np.arange(pages), [page]]) for page in own])
    indptr, last = np.arange(count + 1) * (pages + 1), [sizes.page_size // 2] * count
    q = torch.randn(sizes.layers, count, sizes.heads, sizes.head_dim, device=device).to(torch.bfloat16)
    outs = torch.empty(q.shape, dtype=torch.float32, device=device)
    lses = torch.empty(q.shape[:3], dtype=torch.float32, device=device)
    whole = bed.pages_of(contents)
    same = PagedDecode(device, max_pages=len(table))
    same.plan(indptr, table, last, *sizes.plan, o_data_type=torch.float32)
    together = StreamedDecode(bed.stream)
    together.plan(
        indptr, table, last, *sizes.plan, in_host=np.zeros(len(table), dtype=np.bool_), o_data_type=torch.float32
    )  # fmt: skip

    def all_alone() -> None:
        for layer in range(sizes.layers):
            same.run(q[layer], whole[:, layer], out=outs[layer], lse=lses[layer])

    def all_together() -> None:
        for layer in range(sizes.layers):
            together.run(q[layer], whole[:, layer], layer, out=outs[layer], lse=lses[layer])

    replay = _recorded(device, all_alone)
    want = outs.clone()
    same_s = median(_timed(device, replay) for _ in range(steps))
    replay = _recorded(device, all_together)
    shared_s, shared_error = median(_timed(device, replay) for _ in range(steps)), _error(outs, want)
    way = StreamedDecode(bed.stream)
    in_host, slots = table < split, bed.slots(split)[table]

    def step() -> None:
        way.plan(
            indptr, slots, last, *sizes.plan, in_host=in_host, o_data_type=torch.float32
        )  # fmt: skip
        for layer in range(sizes.layers):
            way.run(q[layer], bed.resident[:, layer], layer, out=outs[layer], lse=lses[layer])

    outs.zero_()
    link.measure()
    with at_rest():
        step()
        step()
        settle(device)
        streamed_s = sum(_timed(device, step) for _ in range(steps)) / steps
    bed.stream.release()
    return {
        "questions": count,
        "streamed_tokens": split * sizes.page_size,
        "streamed_ms": round(streamed_s * 1e3, 2),
        "same_slots_ms": round(same_s * 1e3, 2),
        "shared_ms": round(shared_s * 1e3, 2),
        "of_same_slots": round(same_s / streamed_s, 4),
        "of_roofline": round(bed.nbytes(split) / link.gbps / 1e9 / streamed_s, 4),
        "tokens_per_s": round(count / streamed_s, 2),
        "error": _error(outs, want),
        "shared_error": shared_error,
    }


def draw(rows: Sequence[Mapping[str, float]], file: Path) -> None:
    """Plot throughput against the number of questions. ``rows`` are those of ``questions``. Needs matplotlib."""
    from matplotlib.figure import Figure

    names = {
        "streamed_ms": "streamed, HBM for a part of the document",
        "same_slots_ms": "all in HBM, each question reads the document",
        "shared_ms": "all in HBM, questions read the document together",
    }
    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    counts = [row["questions"] for row in rows]
    for key, label in names.items():
        axes.plot(counts, [row["questions"] * 1e3 / row[key] for row in rows], "o-", label=label)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="questions on one document",
        ylabel="tokens per second, all questions",
    )
    axes.set_xticks(counts, labels=[f"{count:g}" for count in counts])
    axes.minorticks_off()
    axes.legend()
    figure.savefig(file)


def main(
    part: Annotated[
        str, Option(help=f"The parts to measure, separated by commas: {', '.join(PARTS)}.")
    ] = "one",
    device: Annotated[str, Option(help="The device that computes attention.")] = "cuda:0",
    context: Annotated[
        int, Option(help="Tokens of the context. 0 for 262144, 131072, 600000 or 1048576, by part.")
    ] = 0,
    hbm: Annotated[
        int, Option(help="Tokens for which there is HBM, with the ring. 0 for 32768 or 16384, by part.")
    ] = 0,
    steps: Annotated[int, Option(min=0, help="Measured steps. 0 for 8, 4, 16 or 16, by part.")] = 0,
    counts: Annotated[
        str, Option(help="Numbers of questions, separated by commas.")
    ] = "1,2,4,8,16,32,64,128",
    layers: Annotated[int, Option(min=1)] = 32,
    page_size: Annotated[int, Option(min=1)] = 64,
    heads: Annotated[int, Option(min=1)] = 32,
    kv_heads: Annotated[int, Option(min=1)] = 8,
    head_dim: Annotated[int, Option(min=1)] = 128,
    ring: Annotated[int, Option(min=1, help="Size of the ring in bytes.")] = RING_NBYTES,
    slab: Annotated[int, Option(min=1, help="Maximum size of a slab in bytes.")] = SLAB_NBYTES,
    link_nbytes: Annotated[int, Option(min=1, help="Size of the contiguous copies in bytes.")] = _LINK_NBYTES,
    plot: Annotated[
        Path | None, Option(help="File for a plot of the part ``questions``: .png, .svg or .pdf.")
    ] = None,
    *,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure attention over contexts larger than HBM."""
    chosen = [word.strip() for word in part.split(",")]
    for word in chosen:
        if word not in PARTS:
            raise BadParameter(f"must be one of {', '.join(PARTS)}, got {word!r}", param_hint="--part")
    sizes = Sizes(layers, page_size, heads, kv_heads, head_dim, ring, slab)
    link = Link(device, link_nbytes)
    report: dict[str, object] = {
        "device": processor() if device == "cpu" else torch.cuda.get_device_name(device)
    }
    for word in chosen:
        begun = perf_counter()
        tokens = context or {"one": 262144, "questions": 131072, "long": 600000, "int8": 1048576}[word]
        room = hbm or (16384 if word == "questions" else 32768)
        times = steps or {"one": 8, "questions": 4}.get(word, 16)
        if word == "questions":
            numbers = [int(each) for each in counts.split(",")]
            found = questions(device, sizes, tokens, room, numbers, times, link)
            if plot is not None:
                draw(cast("list[dict[str, float]]", found["rows"]), plot)
        else:
            distinct = tokens // page_size if word == "one" else 256
            codec = "int8" if word == "int8" else "none"
            found = decode(device, sizes, tokens, room, times, distinct, codec, link)
        report[word] = found | {"took_s": perf_counter() - begun}
        for name, value in found.items():
            echo(
                f"{word:10} {name:20} {value:.6g}"
                if isinstance(value, float)
                else f"{word:10} {name:20} {value}"
            )
    if as_json:
        print_json(report)


if __name__ == "__main__":
    typer_run(main)
