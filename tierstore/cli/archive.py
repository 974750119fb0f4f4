"""``export`` and ``import``: copy pages of a closed store to one file, and from such a file into another store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli.output import (
    Json,
    format_size,
    print_json,
    progress,
    refusals,
    require_file,
    require_place,
)
from tierstore.errors import ArchiveError, ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tierstore.archive.closed_store import ClosedSource, Shard
    from tierstore.archive.export import Exported
    from tierstore.archive.file_format import Description
    from tierstore.archive.intake import Imported
    from tierstore.cli.document_keys import Document
    from tierstore.config import NvmeConfig
    from tierstore.types import PageKey

Config = Annotated[Path, typer.Option(help="Configuration of the store; its nvme section is used.")]
_SHOWN_KEYS = 20


def export(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; replaced atomically.")],
    config: Config,
    keys: Annotated[
        Path | None, typer.Option(help="File of page keys in hex, one per line; # begins a comment.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Export every page.")] = False,
    doc: Annotated[
        Path | None,
        typer.Option(help="Text file: export the pages of prompts that begin with this document."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Model that read the document of --doc: smollm2, gemma3, or a model's folder."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="dtype in which --model computes. Default: that of the pages in the directory."),
    ] = None,
    fingerprint: Annotated[
        str, typer.Option(help="First digits of a fingerprint, if the directory has several models.")
    ] = "",
    loss_class: Annotated[
        str, typer.Option(help="Loss class of the pages (exact, int8, ...), if the directory has several.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Write pages of a closed store to one portable file, unchanged. Exit code 1 if some pages are missing."""
    with refusals(as_json):
        import asyncio

        from tierstore.archive import closed_store
        from tierstore.archive.export import write_archive

        if (keys is not None) + everything + (doc is not None) != 1 or (doc is None) != (model is None):
            raise ConfigError(
                "choose the pages to export: --keys FILE, --all, or --doc FILE with --model NAME"
            )
        path = _nvme(config).path
        require_place("OUT", out)
        listed = None if keys is None else _keys(keys)
        shards = [
            each for each in closed_store.shards_of(path) if each.directory.name.startswith(fingerprint)
        ]
        document = None if doc is None or model is None else _document(doc, model, dtype, shards)
        if document is not None:
            shards = document.shards_among(shards)
        with closed_store.open_source(_only(shards, path, document)) as source, _bar("exported") as show:
            _choose(source, path, listed, loss_class)
            wanted = listed or (source.keys() if document is None else document.keys(source))
            done = asyncio.run(write_archive(out, wanted, source, show))
    _say_exported(done)
    if as_json:
        print_json({"ok": not done.missing, **asdict(done)})
    raise typer.Exit(1 if done.missing else 0)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that export wrote.")],
    config: Config,
    new_model: Annotated[
        bool, typer.Option("--new-model", help="Allow a new model beside the others in the directory.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Import the valid pages of a file into a closed store. Exit code 1 if a page is still missing then."""
    with refusals(as_json):
        import asyncio

        from tierstore.archive import closed_store, intake
        from tierstore.config import load_config

        settings, nvme = load_config(config), _nvme(config)
        require_file("FILE", file, "a file that `tierstore export` wrote")
        description = asyncio.run(intake.read_contents(file)).description
        allowed, found = settings.page_size, description.layout.page_size
        if allowed not in (None, found):
            raise ArchiveError(
                f"{file}: its pages have page_size {found}, but {config} sets page_size {allowed}"
            )
        if not new_model:
            _require_known(nvme.path, description, file)
        with (
            closed_store.open_sink(
                nvme.path, description, capacity=nvme.capacity, codec=settings.codec, payload=nvme.payload
            ) as sink,
            _bar("imported") as show,
        ):
            done = asyncio.run(intake.read_archive(file, sink, show))
    _say_imported(done)
    if as_json:
        print_json({"ok": done.complete, **asdict(done)})
    raise typer.Exit(0 if done.complete else 1)


def _require_known(path: Path, description: Description, file: Path) -> None:
    from tierstore.archive import closed_store

    try:
        closed_store.require_known(path, description)
    except ArchiveError as error:
        raise ArchiveError(
            f"{file}: {error}; use --new-model to add a directory for these pages to {path}"
        ) from error


def _nvme(config: Path) -> NvmeConfig:
    from tierstore.config import load_config

    nvme = load_config(config).nvme
    if nvme is None:
        raise ConfigError(
            f"{config}: the configuration has no nvme section, which names the store's directory"
        )
    return nvme


def _only(shards: Sequence[Shard], path: Path, document: Document | None) -> Shard:
    if len(shards) == 1:
        return shards[0]
    whose = "with this fingerprint" if document is None else f"of {document.model} in {document.dtype}"
    if not shards:
        raise ConfigError(f"{path} has no pages {whose}; `tierstore inspect` lists what it has")
    there = ", ".join(f"{shard.directory.name[:12]}: {shard.description.models[:40]}" for shard in shards)
    raise ConfigError(
        f"{path} has {len(shards)} directories with pages {whose} ({there}); choose one with --fingerprint"
    )


def _choose(source: ClosedSource, path: Path, listed: list[PageKey] | None, loss_class: str) -> None:
    """Choose the one loss class of the file. Pages of two classes must not stand for each other, but their keys are
    equal.
    """
    found = source.classes(listed)
    there = ", ".join(f"{name}: {count}" for name, count in found.items())
    if loss_class and found and loss_class not in found:
        raise ConfigError(
            f"--loss-class must be one of {', '.join(found)}, got {loss_class!r}: {path} has no other of these pages"
        )
    if not loss_class and len(found) > 1:
        raise ConfigError(f"{path} has pages of several loss classes ({there}); choose one with --loss-class")
    if found:
        source.choose(loss_class or next(iter(found)))


def _document(doc: Path, model: str, dtype: str | None, shards: Sequence[Shard]) -> Document:
    require_file("--doc", doc, "a text file")
    if find_spec("transformers") is None:
        raise ConfigError("--doc needs transformers: run pip install -e '.[hf]' in the checkout")
    from tierstore.cli.document_keys import Document

    there = sorted({spec.dtype for shard in shards for spec in shard.description.layout.specs})
    if dtype is None and len(there) > 1:
        raise ConfigError(f"the directory has pages of {' and '.join(there)}; choose one with --dtype")
    return Document(doc, model, dtype or (there[0] if there else "float32"))


def _keys(path: Path) -> list[PageKey]:
    from tierstore.keys import KEY_NBYTES
    from tierstore.types import PageKey

    require_file("--keys", path, "a file of keys in hex, one per line")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file of keys in hex, one per line") from error
    found = []
    for number, line in enumerate(lines, 1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            key = bytes.fromhex(text)
        except ValueError:
            key = b""
        if len(key) != KEY_NBYTES:
            raise ConfigError(
                f"{path}, line {number}: a key has {2 * KEY_NBYTES} hex digits, got {text[:80]!r}"
            )
        found.append(PageKey(key))
    if not found:
        raise ConfigError(f"{path} has no keys, expected keys in hex, one per line")
    return found


def _say_exported(done: Exported) -> None:
    codecs = ", ".join(f"{count} with codec {name}" for name, count in done.codecs.items())
    typer.echo(f"{done.path}: {done.pages} pages ({codecs}), {format_size(done.nbytes)}")
    _say_keys("not exported", [(key, reason) for key, reason in done.missing])


def _say_imported(done: Imported) -> None:
    typer.echo(f"{done.path}: {done.pages} pages imported, {done.present} were already present")
    _say_keys("damaged", done.damaged)
    _say_keys("pages before it are missing", [(key, "") for key in done.orphans])
    _say_keys("nvme.capacity is full", [(key, "") for key in done.no_room])


def _say_keys(what: str, keys: Sequence[tuple[PageKey, str]]) -> None:
    for key, reason in keys[:_SHOWN_KEYS]:
        typer.echo(f"  {what}: {key.hex()}{': ' + reason if reason else ''}")
    if len(keys) > _SHOWN_KEYS:
        typer.echo(f"  {what}: {len(keys) - _SHOWN_KEYS} more")


@contextmanager
def _bar(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar; the result moves it."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress, transient=True, disable=not progress.is_interactive) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
