"""Benchmark of the time to first token after a long stored prefix, compared with a floor and with recomputing.

A real model class with random weights answers through the transformers adapter. The floor is the shortest possible
time. The resource that sets the floor depends on where the pages are:

- Link: the time to copy the pages' bytes at the rate of one contiguous copy from page-locked memory.
- Disk: the time to read the records' bytes at the rate at which the raw disk reads pieces of the same size.
- Computing: the time of the same answer with all pages in HBM.
"""

# transformers leaves some of its functions untyped:
# mypy: allow-untyped-calls

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from statistics import mean, median
from time import perf_counter
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from tierstore.adapters.huggingface import ATTENTION, TierStoreCache, cache_argument, page_spec
from tierstore.bench import measurement
from tierstore.bench.link import Ceiling, device_of, settle
from tierstore.bench.raw_disk import RawDisk
from tierstore.config import load_config
from tierstore.errors import ConfigError
from tierstore.gpu.device import open_device
from tierstore.gpu.pool import GroupedPages
from tierstore.host.free_memory import available_nbytes
from tierstore.lease import Lease
from tierstore.store import TierStore
from tierstore.types import LeaseState, PageKey, Tier, format_size

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

PATIENCE_S = 600.0
_PAGES_AT_ONCE = 64
_MOST_LOSS = 0.1


@dataclass(frozen=True, slots=True)
class Sizes:
    """Dimensions of a Llama model.

    ``layers``, ``heads`` and ``kv_heads`` are the numbers of layers, of query heads and of KV heads. ``hidden`` and
    ``ffn`` are the widths of the layers and of their feed-forward networks. ``vocabulary`` is the number of tokens.
    """

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations per token for all multiplications with weights, without the output layer."""
        head = self.hidden // self.heads
        kv = 2 * self.kv_heads * head
        return 2.0 * self.layers * self.hidden * (2 * self.hidden + kv + 3 * self.ffn)

    @property
    def weights_nbytes(self) -> int:
        """Size of all weights in bfloat16, in bytes.

        The embedding and the output layer do not share their weights, so both are counted.
        """
        kv = 2 * self.kv_heads * self.head_dim
        layer = self.hidden * (2 * self.hidden + kv + 3 * self.ffn + 2)
        return 2 * (2 * self.vocabulary * self.hidden + self.layers * layer + self.hidden)

    @property
    def head_dim(self) -> int:
        """Number of elements in the K or V vector of one head and token."""
        return self.hidden // self.heads

    def chunk_nbytes(self, tokens: int) -> int:
        """Return a high estimate, in bytes, of the memory needed to compute ``tokens`` tokens at once.

        The estimate is eight times the input of a layer plus four times its feed-forward activations, in
        bfloat16. Weights and pages are not included.
        """
        return 2 * tokens * (8 * self.hidden + 4 * self.ffn)

    def flops(self, first: int, end: int) -> float:
        """Return the number of floating-point operations needed to compute tokens ``first`` to ``end`` (exclusive).

        Each token attends to itself and all earlier tokens. The logits of one token are included.
        """
        seen = (end * (end + 1) - first * (first + 1)) / 2
        attention = 4.0 * self.layers * self.hidden * seen
        return (end - first) * self.flops_per_token + attention + 2.0 * self.hidden * self.vocabulary


SHAPES = {
    "llama-3.1-8b": Sizes(32, 4096, 14336, 32, 8, 128256),
    "tiny": Sizes(4, 64, 128, 4, 2, 97),
}


class Answered(NamedTuple):
    """One answer.

    ``seconds`` is the time from the call to ``acquire`` to the first token, and ``request_seconds`` is the time from
    the creation of ``TierStoreCache`` to the first token. ``token`` is the first token. ``reused`` is the number of
    reused tokens, and ``tiers`` contains the tiers in which these tokens were found.
    """

    seconds: float
    request_seconds: float
    token: int
    reused: int
    tiers: frozenset[Tier]


class ClockedStore(TierStore):
    """A store that records when ``acquire`` is first called.

    ``asked_at`` is that time, on the clock of ``time.perf_counter``. Set it to None to record the next call.
    """

    asked_at: float | None = None

    def acquire(
        self,
        keys: Sequence[PageKey],
        deadline_s: float | None = None,
        into: Sequence[int] | None = None,
        *,
        exact: bool = False,
        wait_for_room_s: float = 0.0,
        keep_in: Tier = Tier.HBM,
    ) -> Lease:
        """Record the time, unless a time is already recorded, and acquire pages. See ``TierStore.acquire``."""
        if self.asked_at is None:
            self.asked_at = perf_counter()
        return super().acquire(
            keys, deadline_s, into, exact=exact, wait_for_room_s=wait_for_room_s, keep_in=keep_in
        )


def random_model(sizes: Sizes, device: str, longest: int) -> PreTrainedModel:
    """Create a Llama model with random bfloat16 weights on ``device``, for up to ``longest`` tokens.

    On the same kind of device, every call creates the same weights.
    """
    config = LlamaConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.ffn,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=longest,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    with torch.device(device_of(device)):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.bfloat16)
    assert isinstance(model, PreTrainedModel)
    model.eval()
    return model


class Rig:
    """A store that contains the pages of a prompt's prefix.

    K and V are random values, which take as long to restore as real K and V.
    """

    def __init__(
        self, store: ClockedStore, model: PreTrainedModel, prompt: torch.Tensor, num_pages: int
    ) -> None:
        """Put the first ``num_pages`` full pages of ``prompt``, ``[1, tokens]``, into the store.

        Return once the pages have been saved to all tiers.
        """
        self.store, self.model, self._prompt = store, model, prompt
        self.keys = store.keys(prompt[0].tolist())
        self.prefix = self.keys[:num_pages]
        pages = store.pages
        assert not isinstance(pages, GroupedPages)
        self._pages = pages
        self.nbytes = num_pages * pages[0].nbytes
        slots = store.allocate(num_pages, timeout_s=PATIENCE_S)
        torch.manual_seed(1)
        pages.normal_()
        self._sums = self._summed(slots)
        self._first = pages[slots[0]].clone()
        settle(pages.device)
        store.put(self.prefix, slots)
        store.flush()
        store.drain(PATIENCE_S)

    def send_down(self, tier: Tier) -> None:
        """Evict the prefix from the tiers above ``tier``.

        Pages that an answer has added after the prefix are evicted from all tiers.

        Raises:
            RuntimeError: A page of the prefix is not in ``tier``, or is still in a faster tier.
        """
        self.store.evict(self.keys[len(self.prefix) :])
        for above in [t for t in Tier if t < tier]:
            self.store.evict(self.prefix, above)
        self.store.drain(PATIENCE_S)
        found = self.store.match(self.prefix)
        if found.num_pages < len(self.prefix) or set(found.tiers) != {tier}:
            raise RuntimeError(
                f"the prefix of {len(self.prefix)} pages is not in {tier.name} alone: {found.num_pages} pages were "
                f"found, in {', '.join(sorted({each.name for each in found.tiers})) or 'no tier'}"
            )

    def answer(self) -> Answered:
        """Generate the first token of an answer greedily, and measure how long this takes.

        Raises:
            RuntimeError: Not all pages of the prefix were reused.
        """
        settle(self._pages.device)
        self.store.asked_at = None
        begun = perf_counter()
        with TierStoreCache(self.store, self._prompt, model=self.model, timeout_s=PATIENCE_S) as cache:
            token = first_token(self.model, self._prompt, cache)
            ended = perf_counter()
            reused, tiers = cache.reused_tokens, frozenset(cache.reused_by_tier)
        if reused != len(self.prefix) * self._pages.shape[3]:
            raise RuntimeError(
                f"{reused} tokens were reused, but the prefix has {len(self.prefix) * self._pages.shape[3]}"
            )
        asked = self.store.asked_at
        assert asked is not None
        return Answered(ended - asked, ended - begun, token, reused, tiers)

    def recomputed(self, chunk: int, most: int | None = None) -> float:
        """Compute the prompt without reusing pages, ``chunk`` tokens at a time.

        Return the time to the first token in seconds. If ``most`` is set, only that many tokens are computed, as
        a warm-up.
        """
        prompt = self._prompt[:, :most]
        settle(self._pages.device)
        begun = perf_counter()
        with (
            torch.inference_mode(),
            TierStoreCache(self.store, prompt, model=self.model, storing="no-store") as cache,
        ):
            for part in prompt.split(chunk, dim=1):
                out = self.model(part, logits_to_keep=1, **{cache_argument(self.model): cache})
            int(out.logits[0, -1].argmax())
            return perf_counter() - begun

    def checked(self, *, lossy: bool) -> float:
        """Load the prefix into HBM, check its bytes, and return the relative error of its first page.

        Raises:
            RuntimeError: Not all pages were loaded, a page differs from the one that was put, or, if ``lossy``,
                the first page differs by more than 10 %.
        """
        with self.store.acquire(self.prefix) as lease:
            whole = lease.wait(PATIENCE_S) is LeaseState.READY and lease.num_pages == len(self.prefix)
            if not whole:
                raise RuntimeError(
                    f"only {lease.num_pages} pages were loaded into HBM: {lease.missing_because}"
                )
            first = self._pages[lease.slots[0]].float()
            want = self._first.float()
            error = float((first - want).norm() / want.norm())
            if not lossy and not torch.equal(self._summed(lease.slots), self._sums):
                raise RuntimeError("restored pages differ from the pages that were put")
        if error > (_MOST_LOSS if lossy else 0.0):
            raise RuntimeError(
                f"the first restored page has a relative error of {error:.3g}, which is too large"
            )
        return error

    def _summed(self, slots: list[int]) -> torch.Tensor:
        words = self._pages.view(torch.int64)
        parts = [slots[i : i + _PAGES_AT_ONCE] for i in range(0, len(slots), _PAGES_AT_ONCE)]
        return torch.cat([words[part].flatten(1).sum(1) for part in parts])


def first_token(model: PreTrainedModel, prompt: torch.Tensor, cache: TierStoreCache) -> int:
    """Generate one token greedily, wait for it, and return its ID."""
    given = {cache_argument(model): cache}
    out = model.generate(prompt, max_new_tokens=1, do_sample=False, **given)  # type: ignore[operator]
    return int(out[0, -1])


@contextmanager
def rig(
    model: PreTrainedModel,
    prompt: torch.Tensor,
    page_size: int,
    prefix: int,
    below: Mapping[str, Mapping[str, object]],
) -> Iterator[Rig]:
    """Open a store and fill it with the prompt's prefix, for the duration of a ``with`` block.

    Args:
        model: The model.
        prompt: The token IDs of the prompt, ``[1, tokens]``.
        page_size: Number of tokens per page.
        prefix: Length of the prefix in tokens, rounded down to full pages.
        below: Configuration sections of the tiers below HBM. HBM gets enough pages for the whole prompt.
    """
    spec = page_spec(model.config, page_size, model.dtype, "tierstore-bench")
    pages = -(-prompt.shape[1] // page_size) + 1
    config = {"hbm": {"capacity": pages * spec.page_nbytes, "device": str(model.device)}, **below}
    with ClockedStore.open(load_config(config), spec) as store:
        assert isinstance(store, ClockedStore)
        filled = Rig(store, model, prompt, prefix // page_size)
        with measurement.at_rest():
            yield filled


CHUNKS = (65536, 16384)
"""Numbers of tokens to compute at a time if no page is reused.

The first number is used if the device has enough memory for that many tokens.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """Parameters of the benchmark.

    ``shape`` is a name in ``SHAPES``. ``prefix`` and ``question`` are lengths in tokens; the prefix is rounded down
    to full pages. ``page_size`` is in tokens. ``rounds`` is the number of answers per row.
    """

    device: str
    shape: str
    prefix: int
    question: int
    page_size: int
    rounds: int

    @property
    def weights_nbytes(self) -> int:
        """Size of the model's weights in bytes."""
        return SHAPES[self.shape].weights_nbytes

    def pages_nbytes(self, prefix: int) -> int:
        """Return the total size in bytes of the pages of a prompt with this prefix, plus one extra page."""
        sizes = SHAPES[self.shape]
        token = sizes.layers * 2 * sizes.kv_heads * sizes.head_dim * 2
        pages = -(-(prefix + self.question) // self.page_size) + 1
        return pages * self.page_size * token

    def require_room(self, disk_prefix: int) -> None:
        """Raise ConfigError unless the model and the pages fit into device memory and host memory.

        ``disk_prefix`` is the length of the prefix, in tokens, that is used when pages are on NVMe. Call this before
        the model or a store is created.
        """
        pages = self.pages_nbytes(max(self.prefix, disk_prefix))
        upper = self.weights_nbytes + pages
        free = open_device(self.device).available_nbytes()
        if free is not None:
            self._require("on the device", upper, free)
        self._require("of memory", pages + (upper if free is None else 0), available_nbytes())

    def chunk(self, disk_prefix: int) -> int:
        """Return the largest of ``CHUNKS`` that fits into device memory alongside the model and the pages.

        If none fits, return the last one.
        """
        free = open_device(self.device).available_nbytes()
        upper = self.weights_nbytes + self.pages_nbytes(max(self.prefix, disk_prefix))
        left = 0 if free is None else free - upper
        return next((n for n in CHUNKS if SHAPES[self.shape].chunk_nbytes(n) <= left), CHUNKS[-1])

    def _require(self, where: str, needed: int, available: int | None) -> None:
        if available is None or needed <= available:
            return
        raise ConfigError(
            f"the weights of --shape {self.shape} and the pages of --prefix {self.prefix} need {format_size(needed)} "
            f"{where}, but only {format_size(available)} are available; use a smaller --prefix, or --shape tiny"
        )

    def prompt(self, prefix: int) -> torch.Tensor:
        """Return the token IDs of the prompt, ``[1, prefix + question]``, with the prefix rounded to full pages.

        Every call with the same prefix returns the same random tokens.
        """
        chance = torch.Generator().manual_seed(7)
        whole = prefix // self.page_size * self.page_size + self.question
        words = torch.randint(0, SHAPES[self.shape].vocabulary, (1, whole), generator=chance)
        return words.to(device_of(self.device))


Floor = Literal["link", "disk", "compute", "none"]

_CONTIGUOUS = 1 << 30
_HELD = 0.6
"""Capacity of host memory with a codec, as a share of the capacity without a codec. Includes a reserve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TtftRow:
    """One row of the TTFT benchmark. Times are medians over the rounds.

    ``ttft_ms`` is the time from the call to ``acquire`` until the first token is on the host. ``least_ms`` and
    ``most_ms`` are the shortest and the longest of these times. ``request_ms`` also includes computing the page
    keys from the prompt's tokens. ``floor_ms`` is the shortest time that the resource ``floor`` allows, and
    ``ratio`` is ``ttft_ms`` divided by ``floor_ms``. ``nbytes`` is the number of bytes read from disk or copied
    over the link. ``ceiling_gbps`` is the rate of the disk or the link in GB/s. ``rel_error`` is the relative
    error of the first restored page.
    """

    tier: str
    codec: str
    prefix: int
    question: int
    rounds: int
    ttft_ms: float
    each_ms: tuple[float, ...]
    """Time to first token of each round in milliseconds, in the order of the rounds."""
    least_ms: float
    most_ms: float
    request_ms: float
    nbytes: int
    floor: Floor
    floor_ms: float
    each_floor_ms: tuple[float, ...] = ()
    """Floor of each round in milliseconds. Only rows for NVME have a floor per round; see ``Bench.disk_row``."""
    ratio: float
    ceiling_gbps: float
    same_token: bool
    """Whether all rounds gave the same first token as the first row with this prefix."""
    rel_error: float
    tflops: float = 0.0
    """Rate of recomputing the prompt in TFLOP/s, ``chunk`` tokens at a time. 0 in all other rows."""
    chunk: int = 0

    def plain(self) -> dict[str, object]:
        """Return the row as JSON-serializable data."""
        return asdict(self)


class Bench:
    """The benchmark with one model on one device.

    ``link_gbps`` is the median rate of contiguous copies from page-locked memory to the device, in GB/s.
    """

    def __init__(self, ask: Ask) -> None:
        """Measure the link and create the model. Raises ConfigError if the device does not exist."""
        self.ask = ask
        block = Ceiling(ask.device, min(_CONTIGUOUS, ask.prefix * 4096))
        block.gbps("h2d")
        self.link_gbps = median(block.gbps("h2d") for _ in range(ask.rounds))
        del block
        self._model = random_model(SHAPES[ask.shape], ask.device, ask.prefix + ask.question + ask.page_size)
        self._hit_s = 0.0
        self._token: dict[int, int] = {}
        """For each prefix length, the first token that the first row with this length produced."""

    @property
    def parameters(self) -> int:
        """Number of parameters of the model."""
        return self._model.num_parameters()

    def memory_rows(self, chunks: Sequence[int]) -> Iterator[TtftRow]:
        """Yield the rows for pages in HBM, for pages in host memory without a codec, and for recomputing.

        For recomputing, there is one row for each number in ``chunks``, the number of tokens to compute at a time.
        """
        with self._rig(self.ask.prefix, {"host": self._host(self.ask.prefix)}) as store:
            hits = self._answers(store, Tier.HBM)
            self._hit_s = median(each.seconds for each in hits)
            self._token[self.ask.prefix] = hits[0].token
            yield self._row("HBM", "none", self.ask.prefix, hits, 0, ("none", 0.0, 0.0), 0.0)
            store.checked(lossy=False)
            found = self._answers(store, Tier.HOST)
            error = store.checked(lossy=False)
            yield self._row(
                "HOST", "none", self.ask.prefix, found, store.nbytes, self._link(store.nbytes), error
            )
            store.send_down(Tier.HOST)
            for chunk in chunks:
                yield self._recomputed(store, chunk)

    def coded_row(self, codec: str) -> TtftRow:
        """Return the row for pages in host memory that are encoded with ``codec``."""
        held = {"host": {**self._host(self.ask.prefix, _HELD), "codec": codec}}
        with self._rig(self.ask.prefix, held) as store:
            found = self._answers(store, Tier.HOST)
            moved = len(store.prefix) * _slot_nbytes(store)
            error = store.checked(lossy=True)
            return self._row("HOST", codec, self.ask.prefix, found, moved, self._link(moved), error)

    def disk_row(self, codec: str, prefix: int, place: Path, readers: int) -> TtftRow:
        """Return the row for pages on NVMe.

        A raw file is read before each round and after the last one. The floor of a round is the mean time of the
        reads before and after it, because a disk's speed changes over time. ``ratio`` is the median of the ratios of
        all rounds.

        Args:
            codec: The value of ``nvme.codec``. With a lossy codec, pages in host memory are encoded as well.
            prefix: Length of the prefix in tokens.
            place: Directory for the store and the raw file. It is created here, and removed at the end.
            readers: Number of threads that read.
        """
        place.mkdir()
        lossy = codec not in ("none", "exp")
        host = self._host(prefix)
        if lossy:  # pages then stay encoded in host memory, and the device decodes them; users would set this
            host = {**self._host(prefix, _HELD), "codec": codec.removesuffix("+zstd")}
        nvme: dict[str, object] = {
            "path": str(place / "store"),
            "capacity": int(self.ask.pages_nbytes(prefix) * 1.5) + (256 << 20),
            "codec": codec,
            "readers": readers,
            "timeout": 60,
        }
        try:
            with self._rig(prefix, {"host": host, "nvme": nvme}) as store:
                moved = _on_disk(store)
                raw = RawDisk(place / "raw", moved, moved // len(store.prefix), readers)
                raws: list[float] = []
                try:
                    found = self._answers(store, Tier.NVME, lambda: raws.append(moved / raw.gbps() / 1e9))
                    raws.append(moved / raw.gbps() / 1e9)
                finally:
                    raw.close()
                error = store.checked(lossy=lossy)
            floors = [mean(pair) for pair in pairwise(raws)]
            floor = median(floors)
            row = self._row("NVME", codec, prefix, found, moved, ("disk", floor, moved / floor / 1e9), error)
            ratios = (each.seconds / beside for each, beside in zip(found, floors, strict=True))
            return replace(row, ratio=median(ratios), each_floor_ms=tuple(each * 1e3 for each in floors))
        finally:
            shutil.rmtree(place)

    # -- private ------------------------------------------------------------------------------------------------

    def _rig(self, prefix: int, below: Mapping[str, Mapping[str, object]]) -> AbstractContextManager[Rig]:
        return rig(self._model, self.ask.prompt(prefix), self.ask.page_size, prefix, below)

    def _host(self, prefix: int, share: float = 1.0) -> dict[str, object]:
        pin = "never" if self.ask.device == "cpu" else "always"
        return {"capacity": int(self.ask.pages_nbytes(prefix) * share), "pin": pin}

    def _answers(self, store: Rig, tier: Tier, between: Callable[[], None] = lambda: None) -> list[Answered]:
        """Answer once per round with the prefix in ``tier``, after one answer that is not counted.

        ``between`` is called before each counted round.

        Raises:
            RuntimeError: Reused pages came from another tier.
        """
        found: list[Answered] = []
        for _ in range(self.ask.rounds + 1):
            store.send_down(tier)
            if found:
                between()
            found.append(store.answer())
            if found[-1].tiers != {tier}:
                raise RuntimeError(
                    f"pages came from {', '.join(sorted(each.name for each in found[-1].tiers))}, "
                    f"expected only {tier.name}"
                )
        return found[1:]

    def _link(self, nbytes: int) -> tuple[Floor, float, float]:
        seconds = nbytes / self.link_gbps / 1e9
        return (
            ("link", seconds, self.link_gbps)
            if seconds > self._hit_s
            else ("compute", self._hit_s, self.link_gbps)
        )

    def _row(
        self,
        tier: str,
        codec: str,
        prefix: int,
        found: list[Answered],
        nbytes: int,
        floor: tuple[Floor, float, float],
        error: float,
    ) -> TtftRow:
        times = [each.seconds for each in found]
        first = self._token.setdefault(prefix, found[0].token)
        return TtftRow(
            tier=tier,
            codec=codec,
            prefix=found[0].reused,
            question=self.ask.question,
            rounds=len(found),
            ttft_ms=median(times) * 1e3,
            each_ms=tuple(each * 1e3 for each in times),
            least_ms=min(times) * 1e3,
            most_ms=max(times) * 1e3,
            request_ms=median(each.request_seconds for each in found) * 1e3,
            nbytes=nbytes,
            floor=floor[0],
            floor_ms=floor[1] * 1e3,
            ratio=median(times) / floor[1] if floor[1] else 0.0,
            ceiling_gbps=floor[2],
            same_token=all(each.token == first for each in found),
            rel_error=error,
        )

    def _recomputed(self, store: Rig, chunk: int) -> TtftRow:
        """Compute three chunks as a warm-up, then the whole prompt once, because repeating it would take too long."""
        store.recomputed(chunk, 3 * chunk)
        seconds = store.recomputed(chunk)
        end = len(store.prefix) * self.ask.page_size + self.ask.question
        return TtftRow(
            tier="none",
            codec="none",
            prefix=0,
            question=end,
            rounds=1,
            ttft_ms=seconds * 1e3,
            each_ms=(seconds * 1e3,),
            least_ms=seconds * 1e3,
            most_ms=seconds * 1e3,
            request_ms=seconds * 1e3,
            nbytes=0,
            floor="none",
            floor_ms=0.0,
            ratio=0.0,
            ceiling_gbps=0.0,
            same_token=False,
            rel_error=0.0,
            tflops=SHAPES[self.ask.shape].flops(0, end) / seconds / 1e12,
            chunk=chunk,
        )


def _slot_nbytes(store: Rig) -> int:
    host = store.store.stats()["host"]
    assert isinstance(host, dict)
    return int(host["slot_nbytes"])


def _on_disk(store: Rig) -> int:
    disk = store.store.stats()["nvme"]
    assert isinstance(disk, dict)
    return int(disk["live_nbytes"])
