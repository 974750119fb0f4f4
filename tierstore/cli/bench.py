"""The ``bench`` commands, which measure this machine and the store.

A missed goal is shown in the output, but does not change the exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from tierstore.cli.output import (
    Json,
    finite,
    is_checkout,
    print_json,
    progress,
    refusals,
    require_folder,
    require_memory,
    require_place,
    size_of,
    study,
    wide_console,
)
from tierstore.cli.replay import _files
from tierstore.demo.documents import COMMON_LICENCES, DocumentError, find_documents, require_texts
from tierstore.demo.model import ALLOWED, SMOLLM2, ModelError, is_prepared, model_folder, prepared_folder
from tierstore.errors import ConfigError
from tierstore.types import MOST_READERS, exact_size, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.progress import Progress, TaskID

    from tierstore.bench.attention import AttentionRow
    from tierstore.bench.codec import Sample
    from tierstore.bench.copy import CopyRow
    from tierstore.bench.fidelity import CodecRow, Distance
    from tierstore.bench.link import Direction
    from tierstore.bench.link import Path as LinkPath
    from tierstore.bench.measurement import Row
    from tierstore.bench.model import Reader
    from tierstore.bench.nvme import DiskRow, Stalls
    from tierstore.bench.overlap import BesideRow, OverlapRow
    from tierstore.bench.prefetch import PrefetchRow
    from tierstore.bench.ttft import TtftRow

PAYLOADS = ["lmdb", "extents"]
"""Values of ``nvme.payload`` that are measured."""

BLOCK_NBYTES = 4096
"""Size of a disk block in bytes. Direct I/O reads and writes only whole blocks."""

PAGE_NBYTES = 300
"""Minimum memory in bytes that the store's Python tables need per page."""

bench = typer.Typer(help="Measure this machine and this store.", no_args_is_help=True)


@bench.callback()
def group() -> None:
    """Measure this machine, and how fast TierStore is on it."""


@bench.command()
def core(
    pages: Annotated[
        int, typer.Option(min=1, help="Pages of the sequence that is matched and leased.")
    ] = 6250,
    put_pages: Annotated[
        int, typer.Option(min=1, help="Pages to put while lock hold times are measured.")
    ] = 10_000,
    records: Annotated[
        int,
        typer.Option(min=1, help="Resident pages whose memory is measured, and records in the catalogue."),
    ] = 1_000_000,
    restored: Annotated[
        int, typer.Option("--restore-pages", min=1, help="Pages of 16 tokens to restore without a GPU.")
    ] = 8192,
    place: Annotated[
        Path, typer.Option("--dir", help="Folder for the disk tier; a subfolder is created and removed.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """Measure the metadata core: time and memory per page, longest lock hold, and time to open a large catalogue.

    Also measures how much CPU time a restore from HOST takes, without a codec and with int8, compared with the
    time of the transfer itself, and how much time the vLLM connector takes in vLLM's scheduler for the same
    number of blocks.

    Takes about two minutes with the default sizes. The catalogue is a sparse file, but the disk must have free
    space for its full size.
    """
    from tierstore.bench import core as measured
    from tierstore.bench import measurement, restore

    found: list[Row] = []
    with refusals(as_json):
        require_folder("--dir", place)
        counts = {
            "--pages": pages, "--put-pages": put_pages, "--records": records, "--restore-pages": restored
        }  # fmt: skip
        option, most = max(counts.items(), key=lambda each: each[1])
        require_memory({option: most * PAGE_NBYTES}, most * PAGE_NBYTES)
    with refusals(as_json), TemporaryDirectory(prefix="tierstore-bench-", dir=place) as folder:
        progress.print("measuring the time per page of the tables and of calls")
        found += measured.reserve_and_commit(pages)
        found += measured.calls(pages)
        progress.print(f"measuring a restore of {restored} pages without a GPU")
        found += restore.rows(restored, 16, "none") + restore.rows(restored, 16, "int8")
        progress.print(f"measuring the connector in vLLM's scheduler with {restored} blocks")
        found += measured.scheduler_rows(restored)
        progress.print(f"measuring lock hold times while {put_pages} pages are copied")
        found += measured.lock_holds(put_pages, Path(folder) / "held")
        progress.print(f"measuring the memory that {records} pages take")
        found += measured.memory(records)
        progress.print(f"opening a catalogue of {records} records")
        for payload in ("lmdb", "extents"):
            found += measured.reopen(records, Path(folder) / f"reopened-{payload}", payload)
    _show_core(measurement.device(), found, as_json)


@bench.command()
def nvme(
    size: Annotated[str, typer.Option(help="Bytes of pages to write and read in one run.")] = "256MiB",
    page_sizes: Annotated[
        str, typer.Option(help="Page sizes, separated by commas.")
    ] = "256KiB,1MiB,2MiB,8MiB",
    rounds: Annotated[
        int, typer.Option(min=1, help="Runs of each kind; each is paired with a run on the raw disk.")
    ] = 7,
    readers: Annotated[
        int, typer.Option(min=1, max=MOST_READERS, help="Reader threads for each of the compared methods.")
    ] = 2,
    stall_size: Annotated[
        str, typer.Option(help="Bytes to move while a thread watches for stalls.")
    ] = "2GiB",
    idle: Annotated[
        float,
        typer.Option(min=0.01, max=3600.0, callback=finite, help="Seconds to watch while nothing moves."),
    ] = 5.0,
    place: Annotated[
        Path, typer.Option("--dir", help="Folder on the disk to measure; a subfolder is created and removed.")
    ] = Path(),
    as_json: Json = False,
) -> None:
    """Compare the NVMe tier with the raw disk, with plain LMDB, and with one file per page.

    Also measures how long other threads of the process stall while pages are written and read. With the default
    sizes, it writes about 100 GiB in all, uses at most 3 GiB of disk space at a time, and takes a few minutes, or
    longer on a slow disk.
    """
    from rich.progress import track

    from tierstore.bench import nvme as measured
    from tierstore.bench.measurement import device, load_average

    before = load_average()
    found: list[DiskRow] = []
    with refusals(as_json):
        pages = _page_sizes("--page-sizes", page_sizes)
        nbytes, stall_nbytes = size_of("--size", size), size_of("--stall-size", stall_size)
        require_folder("--dir", place)
        ways = measured.ways(PAYLOADS)
        if is_checkout():
            ways |= study("contenders").CONTENDERS
        else:
            progress.print(
                "not measuring plain LMDB or one file per page: this needs a checkout of TierStore"
            )
    with refusals(as_json), TemporaryDirectory(prefix="tierstore-bench-", dir=place) as folder:
        for page_nbytes in pages:
            progress.print(f"pages of {format_size(page_nbytes)}")
            kinds = measured.disk_rows(
                page_nbytes,
                nbytes=nbytes,
                rounds=rounds,
                readers=readers,
                ways=ways,
                place=Path(folder),
            )
            number = len(ways)
            for rows in track(kinds, "", number, console=progress, disable=not progress.is_terminal):
                found += rows
        progress.print(f"stalls while {stall_size} are written and read back")
        stalls = {"idle": measured.idle_stalls(idle)} | {
            payload: measured.stalls(payload, nbytes=stall_nbytes, readers=readers, place=Path(folder))
            for payload in PAYLOADS
        }
    _show_disk(found, stalls, [before, load_average()], device(), as_json)


def _page_sizes(option: str, text: str) -> list[int]:
    """Parse sizes separated by commas, and return them in bytes.

    Raises:
        ConfigError: A size is invalid or not a multiple of a disk block.
    """
    sizes = [size_of(option, part) for part in text.split(",")]
    if any(size % BLOCK_NBYTES for size in sizes):
        raise ConfigError(
            f"{option} must be multiples of {exact_size(BLOCK_NBYTES)}, separated by commas, got {text!r}"
        )
    return sizes


def _show_disk(
    found: list[DiskRow], stalls: dict[str, Stalls], load: list[float], name: str, as_json: bool
) -> None:
    console = wide_console()
    console.print(_disk_table(found, name))
    for kind, found_stalls in stalls.items():
        console.print(
            f"stalls, {kind}: " + ", ".join(f"{k} {v:.2f} ms" for k, v in found_stalls._asdict().items())
        )
    console.print(f"load average before and after: {load[0]:.2f}, {load[1]:.2f}")
    if as_json:
        worst = max((stalls[payload] for payload in PAYLOADS), key=lambda each: each.p999)
        print_json(
            {
                "device": name,
                "load_average": load,
                "rows": [row.plain() for row in found],
                "stall_ms": worst._asdict(),
                "stalls_ms": {kind: each._asdict() for kind, each in stalls.items()},
            }
        )


def _disk_table(found: list[DiskRow], name: str) -> Table:
    columns = ("payload", "", "page", "GB/s", "raw", "ratio", "spread", "CPU s/GiB", "disk")
    table = Table(*columns, box=None, header_style="bold", title=name)
    for row in found:
        figures = (row.gbps, row.ceiling_gbps, row.ratio)
        table.add_row(
            row.payload,
            row.op,
            format_size(row.page_bytes),
            *[f"{figure:.2f}" for figure in figures],
            f"{row.spread[0]:.2f}-{row.spread[1]:.2f}",
            f"{row.cpu_s_per_gib:.2f}",
            f"{row.disk_per_byte:.2f}",
        )
    return table


def table_of(title: str, found: Sequence[Row]) -> Table:
    """Return a table with one line for each ``Row``."""
    table = Table("what", "found", "", "goal", "", box=None, header_style="bold", title=title)
    for row in found:
        table.add_row(row.what, f"{row.value:.2f}", row.unit, row.goal_text, "" if row.ok else "missed")
    return table


def _show_core(device: str, found: list[Row], as_json: bool) -> None:
    Console().print(table_of(device, found))
    if as_json:
        print_json({"device": device, "rows": [row.plain() for row in found]})


Device = Annotated[str, typer.Option(help="cpu, cuda or cuda:N, as in hbm.device.")]


def copy(
    device: Device = "cuda:0",
    pieces: Annotated[
        str, typer.Option(help="Page sizes, separated by commas; multiples of 4 KiB.")
    ] = "8MiB,2MiB,64KiB,32KiB,4KiB",
    batch: Annotated[str, typer.Option(help="Bytes per batch.")] = "4GiB",
    contiguous: Annotated[str, typer.Option(help="Bytes of the contiguous copy to compare with.")] = "1GiB",
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of copies; the median is reported.")] = 5,
    small: Annotated[
        str,
        typer.Option(
            help="Pieces up to this size are also copied by the copy kernel and in an engine's layers."
        ),
    ] = "128KiB",
    codec: Annotated[
        str,
        typer.Option(
            help="Codec of host memory (host.codec): compare encoded pages with plain pages. Page sizes must be "
            "multiples of 128 KiB, whole tokens of an 8B model."
        ),
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure how fast scattered pages are copied between HBM and page-locked host memory.

    The rate is compared with that of one contiguous copy in the same process.
    """
    if codec:
        _coded_copies(device, codec, pieces, batch, contiguous, pairs, as_json)
        return
    from tierstore.bench.copy import copy_rows, host_nbytes
    from tierstore.bench.link import Ceiling, device_of, require_piece

    found: list[CopyRow] = []
    with refusals(as_json):
        sizes = [size_of("--pieces", size) for size in pieces.split(",")]
        for piece in sizes:
            require_piece(piece)
        nbytes, most = size_of("--batch", batch), size_of("--small", small)
        block = size_of("--contiguous", contiguous)
        device_of(device)
        require_memory({"--batch": nbytes, "--contiguous": block}, host_nbytes(device, nbytes, block))
        ceiling = Ceiling(device, block)
        for piece in sizes:
            progress.print(f"pages of {format_size(piece)}")
            found += copy_rows(device, piece, nbytes, pairs, "straight", ceiling)
            if piece <= most:
                if device != "cpu":
                    found += copy_rows(device, piece, nbytes, pairs, "kernel", ceiling)
                found += copy_rows(device, piece, nbytes, pairs, "slab", ceiling)
    name = name_of(device)
    _show_copies(found, name)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def _show_copies(found: list[CopyRow], title: str) -> None:
    header = ("way", "page", "pages", "GB/s", "ceiling", "ratio", "path", "submit ms")
    table = Table(*header, box=None, title=title)
    for row in found:
        rates = (f"{row.gbps:.2f}", f"{row.ceiling_gbps:.2f}", f"{row.ratio:.3f}")
        size, number = format_size(row.piece_bytes), str(row.num_pieces)
        table.add_row(row.direction, size, number, *rates, row.path, f"{row.submit_ms:.1f}")
    wide_console().print(table)


def _coded_copies(
    device: str, codec: str, pieces: str, batch: str, contiguous: str, pairs: int, as_json: bool
) -> None:
    from tierstore.bench.copy import TOKEN_NBYTES, CodedRow, coded_host_nbytes, coded_rows, require_codec
    from tierstore.bench.link import Ceiling, device_of

    found: list[CodedRow] = []
    with refusals(as_json):
        given = [size_of("--pieces", size) for size in pieces.split(",")]
        sizes, nbytes = [size for size in given if size % TOKEN_NBYTES == 0], size_of("--batch", batch)
        if not sizes:
            raise ConfigError(
                f"--pieces with --codec must be multiples of {exact_size(TOKEN_NBYTES)}, got {pieces!r}"
            )
        require_codec(codec)
        block = size_of("--contiguous", contiguous)
        device_of(device)
        require_memory({"--batch": nbytes, "--contiguous": block}, coded_host_nbytes(device, nbytes, block))
        ceiling = Ceiling(device, block)
        for size in sizes:
            progress.print(f"pages of {format_size(size)}")
            found += coded_rows(device, codec, size, nbytes, pairs, ceiling)
    name = name_of(device)
    header = ("way", "page", "pages", "payload", "GB/s", "as they are", "ratio", "ceiling", "error", "path")
    table = Table(*header, box=None, title=f"{name}, {codec}")
    for row in found:
        sizes_of = (format_size(row.piece_bytes), str(row.num_pieces), format_size(row.payload_bytes))
        rates = (f"{row.gbps:.2f}", f"{row.plain_gbps:.2f}", f"{row.ratio:.3f}", f"{row.ceiling_gbps:.2f}")
        table.add_row(row.direction, *sizes_of, *rates, f"{row.rel_error:.4f}", row.path)
    wide_console().print(table)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def arena(
    device: Device = "cuda:0",
    size: Annotated[
        str, typer.Option(help="Bytes to pin. Default: 64 GiB, or half of the free memory if that is less.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Measure how soon the store's host memory can be used and is page-locked, compared with memory from torch."""
    from tierstore.bench.arena import arena_rows, default_nbytes

    with refusals(as_json):
        nbytes = size_of("--size", size) if size else default_nbytes()
        require_memory({"--size": nbytes}, nbytes)
        found = arena_rows(device, nbytes)
    name = name_of(device)
    table = Table("what", "found", "", "goal", "", box=None, header_style="bold", title=name)
    for row in found:
        table.add_row(row.what, f"{row.value:.3f}", row.unit, row.goal_text, "" if row.ok else "missed")
    Console().print(table)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def name_of(device: str) -> str:
    import torch

    from tierstore.bench import measurement

    return measurement.device() if device == "cpu" else torch.cuda.get_device_name(device)


def attention(
    device: Device = "cuda:0",
    context: Annotated[
        int, typer.Option(min=1, help="Tokens in pages, over all sequences of a batch.")
    ] = 131072,
    batches: Annotated[
        str, typer.Option(help="Numbers of sequences that decode together, separated by commas.")
    ] = "1,16",
    suffixes: Annotated[
        str, typer.Option(help="Numbers of new tokens that follow the context, separated by commas.")
    ] = "64,4096",
    layers: Annotated[int, typer.Option(min=1, help="Layers of a page and of a decoding step.")] = 32,
    filled: Annotated[int, typer.Option(min=1, help="Layers that compute the new tokens in one run.")] = 4,
    page_size: Annotated[
        int, typer.Option(min=1, help="Tokens per page; a token takes 4 KiB per layer.")
    ] = 64,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs; the median is reported.")] = 5,
    as_json: Json = False,
) -> None:
    """Compare attention over pages with torch's fastest SDPA kernel over contiguous K and V, for an 8B model."""
    from tierstore.bench.attention import Pool, decode_row, prefill_row

    found: list[AttentionRow] = []
    with refusals(as_json):
        together, new = _numbers("--batches", batches), _numbers("--suffixes", suffixes)
        if max(together, default=1) > context:
            raise ConfigError(
                f"no number in --batches may exceed --context ({context}), because each sequence needs at "
                f"least one token; got {batches!r}"
            )
        rounded = (batch * -(-(context // batch) // page_size) * page_size for batch in together)
        pool = Pool(device, max([context + max(new, default=0), *rounded]), layers, page_size)
        for batch in together:
            progress.print(f"decoding a batch of {batch}, each with {context // batch} tokens of context")
            found.append(decode_row(pool, batch, context // batch, pairs))
        for queries in new:
            progress.print(f"computing {queries} new tokens after {context} tokens of context")
            found.append(prefill_row(pool, context, queries, min(filled, layers), pairs))
    name = name_of(device)
    _show_attention(name, found)
    if as_json:
        print_json({"device": name, "rows": [row.plain() for row in found]})


def _numbers(option: str, words: str) -> list[int]:
    try:
        found = [int(word) for word in words.split(",") if word.strip()]
    except ValueError:
        found = [0]
    if not all(number >= 1 for number in found):
        raise ConfigError(f"{option} must be whole numbers of at least 1, separated by commas, got {words!r}")
    return found


def _show_attention(name: str, rows: list[AttentionRow]) -> None:
    header = (
        "what",
        "batch",
        "context",
        "new",
        "ms/layer",
        "SDPA",
        "ratio",
        "TB/s",
        "TFLOP/s",
        "error",
        "by",
    )
    table = Table(*header, "memory", box=None, title=name)
    for row in rows:
        sizes = (str(row.batch), str(row.context), str(row.queries))
        times = (f"{row.ms:.3f}", f"{row.ceiling_ms:.3f} {row.ceiling}", f"{row.ratio:.3f}")
        rates = (f"{row.tbps:.3f}", f"{row.tflops:.0f}", f"{row.rel_error:.1e}", row.backend)
        table.add_row(row.what, *sizes, *times, *rates, f"{row.memory_layers:.2f}")
    wide_console().print(table)


LICENCES = ("GPL-3", "GFDL-1.3", "MPL-2.0")
"""Licence texts that are read by default. They have 7,600, 5,200 and 3,700 tokens with SmolLM2's tokenizer."""


def codec(
    model: Annotated[
        str | None,
        typer.Option(help=f"{ALLOWED}. Default: smollm2 if it is prepared, else no model."),
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders to use instead of three licence texts from this machine."),
    ] = None,
    texts: Annotated[
        int,
        typer.Option(min=1, help="Number of texts; above 3, more licence texts from this machine are used."),
    ] = 3,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of each text whose KV is encoded.")] = 2048,
    following: Annotated[
        int, typer.Option(min=1, help="Tokens after the prefix that the model computes.")
    ] = 256,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page.")] = 64,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the first text for the detailed measurements of exp.")
    ] = 3072,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=3600.0,
            callback=finite,
            help="Seconds that one run takes, with one thread or two; there are 252 runs.",
        ),
    ] = 0.1,
    plot: Annotated[
        Path | None, typer.Option(help="File for a plot of ratio against divergence: .png, .svg or .pdf.")
    ] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Use synthetic pages and no model.")] = False,
    as_json: Json = False,
) -> None:
    """Measure each codec on a model's K and V: compression ratio, rates per core, error, and effect on predictions.

    The codec exp is measured in more detail. Without a model, the pages are synthetic, and the effect on the
    model's predictions is not measured.
    """
    from tierstore.bench import codec as measured
    from tierstore.bench import measurement

    before = measurement.load_average()
    with refusals(as_json):
        _plottable(plot)
        require_texts(docs or [])
        folder = None if synthetic else _folder(model)
        if folder is None:
            sample, names, floor, found = _made_up(tokens, page_size)
        else:
            sample, names, floor, found = _of_model(
                folder, docs or [], texts, (prefix, following, page_size, tokens)
            )
        progress.print(f"measuring exp in detail: {sample.source}")
        details = measured.codec_rows(sample, seconds)
        progress.print("comparing two threads with one")
        scaling = measured.scaling_rows(sample, seconds)
        if plot is not None:
            _draw(found, floor, f"{sample.spec.model}: {', '.join(names)}", plot)
    facts = {"source": sample.source, "texts": names, "load_average": [before, measurement.load_average()]}
    _show_codecs(
        measurement.device(), found, floor, {"exp in detail": details, "lossy": scaling}, facts, as_json
    )


def _plottable(plot: Path | None) -> None:
    if plot is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: run pip install 'tierstore[plot]'")
    require_place("--plot", plot)


def _draw(found: list[CodecRow], floor: Distance | None, source: str, plot: Path) -> None:
    from tierstore.bench.fidelity import draw

    if floor is None:
        raise ConfigError("--plot needs a model, because the divergence is not measured for synthetic pages")
    try:
        draw(found, floor.kl, source, plot)
    except ValueError as error:
        raise ConfigError(f"--plot {plot}: {error}") from error


def _folder(model: str | None) -> Path | None:
    """Return the folder of ``model``. Prepare the model if necessary.

    If ``model`` is None, return SmolLM2's folder if SmolLM2 has been prepared, else None.
    """
    if model is None:
        folder = prepared_folder(SMOLLM2)
        return folder if is_prepared(folder) else None
    try:
        return model_folder(model, progress.print)
    except ModelError as error:
        raise ConfigError(str(error)) from error


def _made_up(tokens: int, page_size: int) -> tuple[Sample, list[str], None, list[CodecRow]]:
    from tierstore.bench import fidelity
    from tierstore.bench.codec import synthetic

    sample = synthetic(tokens, page_size)
    progress.print(f"{len(sample.pages)} pages of {format_size(sample.spec.page_nbytes)}: {sample.source}")
    found = [fidelity.codec_row(name, sample.spec, [sample.pages]) for name in fidelity.NAMES]
    return sample, [], None, found


def _of_model(
    folder: Path, docs: list[Path], count: int, sizes: tuple[int, int, int, int]
) -> tuple[Sample, list[str], Distance, list[CodecRow]]:
    from tierstore.bench import fidelity
    from tierstore.bench.codec import sample
    from tierstore.bench.model import Reader

    prefix, following, page_size, tokens = sizes
    progress.print(f"{folder.name}: loading")
    reader = Reader(folder)
    texts = _texts(reader, docs, count, prefix + following)
    try:
        read = list(fidelity.read(reader, texts.values(), prefix, following, page_size))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    cases, floors = [case for case, _ in read], [found for _, found in read]
    floor, spread = fidelity.mean(floors), fidelity.standard_error([each.kl for each in floors])
    progress.print(f"{', '.join(texts)}: a prefix of {prefix} tokens each, then {following} tokens")
    progress.print(
        f"floor (no codec, prefix read {fidelity.PIECE} tokens at a time): KL {floor.kl:.2e} +- {spread:.1e}"
    )
    found = []
    for name in fidelity.NAMES:
        found.append(fidelity.codec_row(name, cases[0].spec, [case.pages for case in cases], reader, cases))
        progress.print(f"{name}: ratio {found[-1].ratio:.3f}, KL {found[-1].kl:.2e}")
    first, text = next(iter(texts.items()))
    return sample(reader, first, text, tokens, page_size), list(texts), floor, found


def _texts(reader: Reader, docs: list[Path], count: int, tokens: int) -> dict[str, str]:
    """Return ``count`` texts of at least ``tokens`` tokens, by name.

    They come from ``docs``. Without ``docs``, they are the licence texts ``LICENCES``. If these are not installed,
    or too few, other licences and package files on this machine are used.
    """
    files = [COMMON_LICENCES / name for name in LICENCES]
    if not docs and count <= len(files) and all(file.is_file() for file in files):
        return {file.name: file.read_text(encoding="utf-8") for file in files[:count]}
    try:
        found = find_documents(reader.tokenizer, count, tokens, 2 * tokens, docs)
    except DocumentError as error:
        raise ConfigError(str(error)) from error
    return {document.name: document.text for document in found}


def _show_codecs(
    device: str,
    found: list[CodecRow],
    floor: Distance | None,
    details: Mapping[str, list[Row]],
    facts: Mapping[str, object],
    as_json: bool,
) -> None:
    from tierstore.bench.fidelity import GOALS, Goal

    kl = None if floor is None else floor.kl
    columns = ("codec", "ratio", "encode MB/s", "decode MB/s", "error K", "error V", "KL", "top-1")
    table = Table(*columns, "ratio >=", "KL <=", "", box=None, header_style="bold", title=device)
    for row in found:
        moved = ("", "") if row.kl is None else (f"{row.kl:.2e} +- {row.kl_error:.0e}", f"{row.top1:.3f}")
        rates = (f"{row.ratio:.3f}", f"{row.encode_mbps:.0f}", f"{row.decode_mbps:.0f}")
        goal = GOALS.get(row.codec, Goal(0))
        most = goal.most(kl)
        goals = (f"{goal.ratio:g}" if goal.ratio else "", "" if most is None else f"{most:.2e}")
        errors = (f"{row.rel_error_k:.4f}", f"{row.rel_error_v:.4f}")
        table.add_row(row.codec, *rates, *errors, *moved, *goals, "" if row.meets(kl) else "missed")
    console = wide_console()
    console.print(table)
    if floor is not None:
        console.print(f"floor (no codec, tokens read in pieces): KL {floor.kl:.2e}, top-1 {floor.top1:.3f}")
    for title, told in details.items():
        console.print(table_of(title, told))
    for name, value in facts.items():
        console.print(f"{name.replace('_', ' ')}: {value}")
    if as_json:
        rows = [row.plain() for row in found]
        floor_told = None if floor is None else floor._asdict()
        exp, lossy = ([row.plain() for row in told] for told in details.values())
        print_json({"device": device, **facts, "floor": floor_told, "rows": rows, "exp": exp, "lossy": lossy})


_WAYS: tuple[tuple[LinkPath, str, tuple[Direction, ...]], ...] = (
    ("straight", "2MiB", ("h2d", "d2h", "both")),
    ("kernel", "32KiB", ("h2d", "d2h")),
    ("slab", "32KiB", ("h2d", "d2h")),
)


def overlap(
    device: Device = "cuda:0",
    restored: Annotated[str, typer.Option(help="Bytes of the lease to restore.")] = "16GiB",
    page_size: Annotated[int, typer.Option(min=1, help="Tokens per page; a token takes 128 KiB.")] = 64,
    layers: Annotated[int, typer.Option(min=1, max=256, help="Layers per page, a power of two.")] = 32,
    compute: Annotated[
        str, typer.Option(help="Compute times as multiples of the copy time, separated by commas.")
    ] = "0.8,1,1.25",
    matrix: Annotated[int, typer.Option(min=8, help="Side of the square matrices to multiply.")] = 4096,
    rounds: Annotated[
        int, typer.Option(min=1, help="Number of measurements of each kind; the median is reported.")
    ] = 5,
    read: Annotated[
        str, typer.Option(help="Bytes read and written by the kernels that run during copies.")
    ] = "4GiB",
    times: Annotated[
        int, typer.Option(min=3, help="Number of times that these kernels run while a batch is copied.")
    ] = 20,
    batch: Annotated[str, typer.Option(help="Bytes of the batch that is copied meanwhile.")] = "4GiB",
    as_json: Json = False,
) -> None:
    """Measure how well computing overlaps with copying pages.

    The first part restores a lease from host memory, and computes each layer as soon as the layer has arrived.
    The second part runs memory-bound kernels during each kind of copy.
    """
    from tierstore.bench.link import device_of
    from tierstore.bench.overlap import host_nbytes, overlap_rows, pages_of

    with refusals(as_json):
        lease, reading = size_of("--restored", restored), size_of("--read", read)
        streamed, parts = size_of("--batch", batch), _parts_of(compute)
        spec = pages_of(layers, page_size)
        device_of(device)
        require_memory({"--restored": lease}, host_nbytes(device, lease))
        beside_nbytes = 2 * (reading + streamed) if device == "cpu" else streamed
        require_memory({"--read": reading, "--batch": streamed}, beside_nbytes)
        progress.print("restoring a lease while layers are computed")
        hidden = overlap_rows(device, spec, lease, rounds, matrix, parts)
        beside = _beside(device, reading, times, streamed, rounds)
    name = name_of(device)
    _show_overlap(name, hidden, beside)
    if as_json:
        print_json(
            {"device": name, "rows": [*(row.plain() for row in hidden), *(row.plain() for row in beside)]}
        )


def _parts_of(text: str) -> list[float]:
    """Parse numbers above 0, separated by commas, for ``--compute``. Raises ConfigError if one is invalid."""
    with suppress(ValueError):
        found = [float(part) for part in text.split(",")]
        if all(0 < part < inf for part in found):
            return found
    raise ConfigError(f"--compute must be numbers above 0, separated by commas, got {text!r}")


def _beside(device: str, read: int, times: int, batch: int, pairs: int) -> list[BesideRow]:
    from tierstore.bench.link import Ceiling
    from tierstore.bench.overlap import Contiguous, Copying, Pages, Reading, beside_row

    kernels = (Reading(device, read), Copying(device, read))
    ceiling = Ceiling(device, batch // 4)
    directions: tuple[Direction, ...] = ("h2d", "d2h", "both")
    block = Contiguous(ceiling, 4)
    found = [beside_row(kernel, block, d, times, pairs) for kernel in kernels for d in directions]
    del block, ceiling
    for path, size, ways in _WAYS:
        if device == "cpu" and path == "kernel":
            continue
        progress.print(f"running kernels while pages are copied: {path}")
        pages = Pages(device, size_of("size", size), batch, path)
        try:
            found += [beside_row(kernel, pages, d, times, pairs) for kernel in kernels for d in ways]
        finally:
            pages.rig.close()
    return found


def _show_overlap(name: str, hidden: list[OverlapRow], beside: list[BesideRow]) -> None:
    console = wide_console()
    columns = ("compute ms", "beside a block", "copy ms", "both ms", "first layer", "GB/s")
    found = Table("compute / copy", *columns, "overlap", "reachable", "ideal", box=None, title=name)
    for row in hidden:
        times = (row.compute_ms, row.beside_ms, row.copy_ms, row.both_ms, row.first_layer_ms, row.gbps)
        parts = (f"{x:.3f}" for x in (row.overlap, row.reachable, row.ideal))
        found.add_row(f"{row.wanted:g}", *(f"{x:.1f}" for x in times), *parts)
    console.print(found)
    console.print(
        f"{hidden[0].num_pages} pages of {format_size(hidden[0].page_bytes)} in {hidden[0].groups} layer groups"
    )
    table = Table(
        "kernel", "beside", "way", "piece", "slower by", "share of HBM", "GB/s", "alone TB/s", box=None
    )
    for one in beside:
        shares = (f"{one.slowdown:.1%}", f"{one.share:.1%}")
        rates = (f"{one.gbps:.1f}", f"{one.alone_tbps:.2f}")
        table.add_row(one.kernel, one.way, one.direction, format_size(one.piece_bytes), *shares, *rates)
    console.print(table)


def prefetch(
    traces: Annotated[
        list[Path],
        typer.Argument(help="Trace files: .jsonl (Mooncake), .json (kv-cache-tester); or folders of them."),
    ],
    hbm: Annotated[str, typer.Option(help="Bytes of KV in HBM.")] = "40GiB",
    host: Annotated[str, typer.Option(help="Bytes in host memory.")] = "100GiB",
    nvme: Annotated[str, typer.Option(help="Bytes on NVMe.")] = "1TiB",
    disk: Annotated[str, typer.Option(help="Bytes per second from NVMe.")] = "6GB",
    link: Annotated[str, typer.Option(help="Bytes per second into HBM.")] = "54GB",
    token: Annotated[str, typer.Option(help="Bytes of KV per token.")] = "128KiB",
    utilisation: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            max=1.0,
            callback=finite,
            help="Load of the server; may be repeated. Default: 0.7 and 0.9.",
        ),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Use only this many requests of each trace.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Replay traces on a simulated server, and compare policies for when to load pages into HBM.

    One policy never loads pages. The others load them when a request starts, ahead of need according to hints, or ahead
    of need with knowledge of the future. The server prefills one request at a time, at the speed measured for an 8B
    model on an H200, and decodes up to 32 requests at once.
    """
    from rich.progress import Progress, TextColumn

    from tierstore.bench.prefetch import Capacities, first, prefetch_rows
    from tierstore.replay.traces import read_traces

    rows: list[PrefetchRow] = []
    with refusals(as_json):
        capacities = Capacities(
            hbm=size_of("--hbm", hbm),
            host=size_of("--host", host),
            nvme=size_of("--nvme", nvme),
            nvme_bytes_per_s=size_of("--disk", disk),
            link_bytes_per_s=size_of("--link", link),
            token_nbytes=size_of("--token", token),
        )
        levels = utilisation or [0.7, 0.9]
        for trace in read_traces(list(_files(traces))):
            part = replace(trace, requests=tuple(first(trace, requests)))
            columns = (*Progress.get_default_columns()[:3], TextColumn("{task.fields[doing]}"))
            with Progress(
                *columns, console=progress, transient=True, disable=not progress.is_interactive
            ) as bar:
                total = len(part.requests) * (1 + 4 * len(levels))
                task = bar.add_task(trace.name, total=total, doing="")
                step = partial(_step, bar, task)
                rows += prefetch_rows(part, capacities, levels, step)
    _show_prefetch(rows)
    if as_json:
        print_json({"rows": [row.plain() for row in rows]})


def _step(bar: Progress, task: TaskID, doing: str, served: int) -> None:
    bar.update(task, advance=served, doing=doing)


def _show_prefetch(rows: Sequence[PrefetchRow]) -> None:
    table = Table("trace", "use", "policy", box=None, header_style="bold")
    for name in ("stall mean", "p99", "of on-lookup", "", "TTFT mean", "p99", "wasted"):
        table.add_column(name, justify="right")
    base = {(r.trace, r.utilisation): r for r in rows if r.policy == "on-lookup"}
    for row in rows:
        other = base[row.trace, row.utilisation]
        table.add_row(
            row.trace,
            f"{row.utilisation:g}",
            row.policy,
            f"{row.stall_mean_s:.4f}",
            f"{row.stall_p99_s:.3f}",
            _ratio(row.stall_mean_s, other.stall_mean_s),
            _ratio(row.stall_p99_s, other.stall_p99_s),
            f"{row.ttft_mean_s:.2f}",
            f"{row.ttft_p99_s:.2f}",
            f"{row.wasted:.1%}",
        )
    wide_console().print(table)


def _ratio(found: float, base: float) -> str:
    return f"{found / base:.2f}" if base else "-"


MOST = 1 << 24
"""Maximum number of tokens per option. It limits the memory for the tokens, which are created before memory is
checked."""


def ttft(
    device: Device = "cuda:0",
    shape: Annotated[str, typer.Option(help="llama-3.1-8b or tiny, with random weights.")] = "llama-3.1-8b",
    prefix: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens of the stored prefix.")] = 131072,
    question: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens that follow the prefix.")] = 64,
    page_size: Annotated[int, typer.Option(min=1, max=MOST, help="Tokens per page.")] = 64,
    rounds: Annotated[int, typer.Option(min=1, help="Answers from each tier; the median is reported.")] = 5,
    chunk: Annotated[
        str,
        typer.Option(
            help="Tokens to compute at a time if nothing is stored. Separate several sizes with commas. "
            "Default: 65536, or 16384 if the device lacks the memory."
        ),
    ] = "",
    host_codecs: Annotated[
        str, typer.Option(help="Codecs of host memory to compare with none, separated by commas.")
    ] = "int8",
    disk_codecs: Annotated[
        str, typer.Option(help="Codecs of the disk to compare, separated by commas.")
    ] = "none,exp,int8",
    disk_prefix: Annotated[
        int, typer.Option(min=0, max=MOST, help="Tokens of the prefix on disk. 0: the same as --prefix.")
    ] = 0,
    readers: Annotated[int, typer.Option(min=1, max=64, help="Threads that read the disk.")] = 8,
    dir_: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder on the disk. Default: the system's temporary folder."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the time to first token of a prompt with a long stored prefix.

    The time is compared with the time to transfer the prefix, and with the time to recompute it.
    """
    from tierstore.bench.ttft import SHAPES, Ask, Bench

    found: list[TtftRow] = []
    with refusals(as_json):
        if shape not in SHAPES:
            raise ConfigError(f"--shape must be one of {', '.join(SHAPES)}, got {shape!r}")
        for option, tokens in (("--prefix", prefix), ("--disk-prefix", disk_prefix)):
            if 0 < tokens < page_size:
                raise ConfigError(f"{option} must be at least {page_size} tokens (one page), got {tokens}")
        if dir_ is not None:
            require_folder("--dir", dir_)
        chunks = _chunks_of(chunk)
        ask = Ask(
            device=device, shape=shape, prefix=prefix, question=question, page_size=page_size, rounds=rounds
        )
        ask.require_room(disk_prefix)
        chunks = chunks or [ask.chunk(disk_prefix)]
        progress.print("building a model with random weights")
        bench = Bench(ask)
        for row in bench.memory_rows(chunks):
            _tell_ttft(row, found)
        for codec in _names(host_codecs):
            _tell_ttft(bench.coded_row(codec), found)
        with TemporaryDirectory(prefix="tierstore-ttft-", dir=dir_) as place:
            for codec in _names(disk_codecs):
                _tell_ttft(bench.disk_row(codec, disk_prefix or prefix, Path(place) / codec, readers), found)
    name = name_of(device)
    _show_ttft(name, found)
    if as_json:
        print_json({"device": name, "parameters": bench.parameters, "rows": [row.plain() for row in found]})


def _chunks_of(words: str) -> list[int]:
    """Parse numbers of tokens, separated by commas, for ``--chunk``. Raises ConfigError if one is invalid."""
    names = _names(words)
    if not all(name.isascii() and name.isdigit() and 0 < int(name) <= MOST for name in names):
        raise ConfigError(
            f"--chunk must be numbers of tokens from 1 to {MOST}, separated by commas, got {words!r}"
        )
    return [int(name) for name in names]


def _names(words: str) -> list[str]:
    return [word.strip() for word in words.split(",") if word.strip()]


def _tell_ttft(row: TtftRow, found: list[TtftRow]) -> None:
    found.append(row)
    beside = f", {row.ratio:.3f} times the floor ({row.floor}, {row.floor_ms:.1f} ms)" if row.ratio else ""
    progress.print(f"{row.tier} {row.codec}: {row.ttft_ms:.1f} ms{beside}")


def _show_ttft(name: str, found: list[TtftRow]) -> None:
    table = Table(
        "from", "codec", "tokens", "first token ms", "least", "most", "request ms", "moved", "floor ms", "of",
        "GB/s", "ratio", "same token", "error", box=None, title=name,
    )  # fmt: skip
    for row in found:
        times = (f"{x:.1f}" for x in (row.ttft_ms, row.least_ms, row.most_ms, row.request_ms))
        floor = (f"{row.floor_ms:.1f}", row.floor, f"{row.ceiling_gbps:.2f}", f"{row.ratio:.3f}")
        rest = (str(row.same_token), f"{row.rel_error:.4f}")
        table.add_row(row.tier, row.codec, str(row.prefix), *times, format_size(row.nbytes), *floor, *rest)
    console = wide_console()
    console.print(table)
    by_way = {(row.tier, row.codec): row.ttft_ms for row in found}
    whole, every = by_way.get(("HOST", "none")), [row for row in found if row.tier == "none"]
    for row in every:
        console.print(
            f"computed {row.chunk} tokens at a time: {row.ttft_ms:.0f} ms, {row.tflops:.0f} TFLOP/s, once"
        )
    computed = min(every, key=lambda row: row.ttft_ms, default=None)
    if computed is not None:
        for (tier, codec), taken in by_way.items():
            if tier != "none":
                console.print(f"{tier} {codec}: {computed.ttft_ms / taken:.1f}x faster than computing")
    for (tier, codec), taken in by_way.items():
        if whole and tier == "HOST" and codec != "none":
            console.print(f"HOST {codec}: {taken / whole:.3f} of the time from HOST with codec none")
