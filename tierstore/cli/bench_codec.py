"""``bench codec``: what each codec saves, how fast it is, and how far it moves a real model."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from tierstore.cli.bench import table_of
from tierstore.cli.output import Json, finite, print_json, progress, refusals, require_place, wide_console
from tierstore.demo.given import require_texts
from tierstore.demo.model import ALLOWED, SMOLLM2
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tierstore.bench.codec import Sample
    from tierstore.bench.fidelity import CodecRow, Distance
    from tierstore.bench.measurement import Row
    from tierstore.bench.reading import Reader

LICENCES = ("GPL-3", "GFDL-1.3", "MPL-2.0")
"""The texts that are read where there are no others: 7.6K, 5.2K and 3.7K tokens of SmolLM2."""


def codec(
    model: Annotated[
        str | None,
        typer.Option(help=f"{ALLOWED}. If not given: smollm2 if it is prepared, else no model."),
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders instead of three of this machine's licences."),
    ] = None,
    texts: Annotated[
        int, typer.Option(min=1, help="How many texts; with more than 3 also others of this machine.")
    ] = 3,
    prefix: Annotated[int, typer.Option(min=1, help="Tokens of each text whose KV is encoded.")] = 2048,
    following: Annotated[int, typer.Option(min=1, help="Tokens after them that the model reads.")] = 256,
    page_size: Annotated[int, typer.Option(min=1, help="Tokens of a page.")] = 64,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens of the first text for the figures of exp.")
    ] = 3072,
    seconds: Annotated[
        float,
        typer.Option(
            min=0.0, max=3600.0, callback=finite, help="Of one run with one thread, or two; there are 252."
        ),
    ] = 0.1,
    plot: Annotated[
        Path | None, typer.Option(help="Draw ratio against divergence into this file: .png, .svg, .pdf.")
    ] = None,
    synthetic: Annotated[bool, typer.Option("--synthetic", help="Made-up pages, no model.")] = False,
    as_json: Json = False,
) -> None:
    """Each codec on real KV: ratio, rates a core, error, and how far a model's next tokens move; then exp in detail.

    Without a model the pages are made up, and what a model would say is left out.
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
        progress.print(f"exp in detail: {sample.source}")
        details = measured.codec_rows(sample, seconds)
        progress.print("two threads against one")
        scaling = measured.scaling_rows(sample, seconds)
        if plot is not None:
            _draw(found, floor, f"{sample.spec.model}: {', '.join(names)}", plot)
    facts = {"source": sample.source, "texts": names, "load_average": [before, measurement.load_average()]}
    _show(measurement.device(), found, floor, {"exp in detail": details, "lossy": scaling}, facts, as_json)


def _plottable(plot: Path | None) -> None:
    if plot is None:
        return
    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: in the checkout pip install -e '.[plot]'")
    require_place("--plot", plot)


def _draw(found: list[CodecRow], floor: Distance | None, source: str, plot: Path) -> None:
    from tierstore.bench.plot import draw

    if floor is None:
        raise ConfigError("--plot needs a model: made-up pages move none")
    try:
        draw(found, floor.kl, source, plot)
    except ValueError as error:
        raise ConfigError(f"--plot {plot}: {error}") from error


def _folder(model: str | None) -> Path | None:
    """The model's folder; None where none was asked for and none is prepared."""
    from tierstore.demo.model import ModelError, is_prepared, model_folder, prepared_folder

    if model is None:
        folder = prepared_folder(SMOLLM2)
        return folder if is_prepared(folder) else None
    try:
        return model_folder(model, progress.print)
    except ModelError as error:
        raise ConfigError(str(error)) from error


def _made_up(tokens: int, page_size: int) -> tuple[Sample, list[str], None, list[CodecRow]]:
    from tierstore.bench import codec as kv
    from tierstore.bench import fidelity

    sample = kv.synthetic(tokens, page_size)
    progress.print(f"{len(sample.pages)} pages of {sample.spec.page_nbytes} bytes: {sample.source}")
    found = [fidelity.codec_row(name, sample.spec, [sample.pages]) for name in fidelity.NAMES]
    return sample, [], None, found


def _of_model(
    folder: Path, docs: list[Path], count: int, sizes: tuple[int, int, int, int]
) -> tuple[Sample, list[str], Distance, list[CodecRow]]:
    from tierstore.bench import codec as kv
    from tierstore.bench import fidelity
    from tierstore.bench.reading import Reader

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
    progress.print(f"{', '.join(texts)}: {prefix} tokens each, then {following}")
    progress.print(f"floor, read in pieces of {fidelity.PIECE}: KL {floor.kl:.2e} +- {spread:.1e}")
    found = []
    for name in fidelity.NAMES:
        found.append(fidelity.codec_row(name, cases[0].spec, [case.pages for case in cases], reader, cases))
        progress.print(f"{name}: ratio {found[-1].ratio:.3f}, KL {found[-1].kl:.2e}")
    first, text = next(iter(texts.items()))
    return kv.sample(reader, first, text, tokens, page_size), list(texts), floor, found


def _texts(reader: Reader, docs: list[Path], count: int, tokens: int) -> dict[str, str]:
    """Texts by their names: three licences, or what is found, in ``docs`` or on this machine."""
    from tierstore.demo.documents import COMMON_LICENCES, DocumentError, find_documents

    files = [COMMON_LICENCES / name for name in LICENCES]
    if not docs and count <= len(files) and all(file.is_file() for file in files):
        return {file.name: file.read_text(encoding="utf-8") for file in files[:count]}
    try:
        found = find_documents(reader.tokenizer, count, tokens, 2 * tokens, docs)
    except DocumentError as error:
        raise ConfigError(str(error)) from error
    return {document.name: document.text for document in found}


def _show(
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
        console.print(f"floor, the same tokens read in pieces: KL {floor.kl:.2e}, top-1 {floor.top1:.3f}")
    for title, told in details.items():
        console.print(table_of(title, told))
    for name, value in facts.items():
        console.print(f"{name.replace('_', ' ')}: {value}")
    if as_json:
        rows = [row.plain() for row in found]
        floor_told = None if floor is None else floor._asdict()
        exp, lossy = ([row.plain() for row in told] for told in details.values())
        print_json({"device": device, **facts, "floor": floor_told, "rows": rows, "exp": exp, "lossy": lossy})
