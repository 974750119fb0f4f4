"""The commands ``export`` and ``import``, which copy pages from a closed store to a portable file and back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from tierstore.cli.output import Json, print_json, progress, refusals, require_file, require_place
from tierstore.demo.model import require_model
from tierstore.errors import ArchiveError, ConfigError
from tierstore.types import format_size

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Sequence
    from types import FrameType

    from tierstore.archive.closed_store import ClosedSource, Shard
    from tierstore.archive.export import Exported
    from tierstore.archive.file_format import Description
    from tierstore.archive.intake import Imported
    from tierstore.cli.document_keys import Document
    from tierstore.config import NvmeConfig
    from tierstore.types import PageKey

Config = Annotated[Path, typer.Option(help="Configuration of the store; its nvme section is used.")]
_SHOWN_KEYS = 20
_READ_FIRST = (
    "Let the model read the document first: send it to `tierstore serve` with this configuration (POST /v1/documents), "
    "or run it through a TierStoreCache. Then stop that program and export again. Text that was read with a salt, a "
    "tenant's key or extras has other page keys: list these in a file for --keys"
)
"""Advice in the error message about a document that no model has read."""


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
        typer.Option(help="Model that computed the pages of --doc: smollm2, gemma3, or a model's folder."),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="dtype in which --model computes. Default: the dtype of the pages in the directory."
        ),
    ] = None,
    fingerprint: Annotated[
        str, typer.Option(help="First digits of a fingerprint, if the directory has several models.")
    ] = "",
    loss_class: Annotated[
        str, typer.Option(help="Loss class of the pages (exact, int8, ...), if the directory has several.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Copy pages of a closed store, unchanged, to a portable file. Exit code 1 if some pages could not be copied."""
    with refusals(as_json):
        from tierstore.archive import closed_store
        from tierstore.archive.export import write_archive

        if (keys is not None) + everything + (doc is not None) != 1 or (doc is None) != (model is None):
            raise ConfigError(
                "choose the pages to export: --keys FILE, --all, or --doc FILE with --model NAME"
            )
        path = _nvme(config).path
        require_place("OUT", out)
        if doc is not None and model is not None:
            require_file("--doc", doc, "a text file")
            require_model(model)
        listed = None if keys is None else _keys(keys)
        if doc is not None and (not path.exists() or (path.is_dir() and not any(path.iterdir()))):
            raise ConfigError(f"no store has used {path} yet, so {model} has not read {doc}. {_READ_FIRST}")
        shards = [
            each for each in closed_store.shards_of(path) if each.directory.name.startswith(fingerprint)
        ]
        document = None if doc is None or model is None else _document(doc, model, dtype, shards)
        if document is not None:
            shards = document.shards_among(shards)
        with closed_store.open_source(_only(shards, path, document)) as source, _bar("exported") as show:
            _choose(source, path, listed, loss_class)
            wanted = listed or (source.keys() if document is None else document.keys(source))
            if not wanted and document is not None:
                raise ConfigError(
                    f"{path} has no pages of the document {doc}: {model} has not read it there at the start of a "
                    f"chat or on its own. {_READ_FIRST}"
                )
            done = _run(write_archive(out, wanted, source, show))
    _say_exported(done)
    if as_json:
        print_json({"ok": not done.missing, **asdict(done)})
    raise typer.Exit(1 if done.missing else 0)


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File that export wrote.")],
    config: Config,
    new_model: Annotated[
        bool,
        typer.Option("--new-model", help="Allow pages of a model that the directory does not contain yet."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Import pages into a closed store from a file that export wrote.

    Damaged pages are left out. Exit code 1 if the store does not have all pages of the file afterwards.
    """
    with refusals(as_json):
        from tierstore.archive import closed_store, intake
        from tierstore.config import load_config

        settings, nvme = load_config(config), _nvme(config)
        require_file("FILE", file, "a file that `tierstore export` wrote")
        description = _run(intake.read_contents(file)).description
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
            done = _run(intake.read_archive(file, sink, show))
    _say_imported(done)
    if as_json:
        print_json({"ok": done.complete, **asdict(done)})
    raise typer.Exit(0 if done.complete else 1)


_T = TypeVar("_T")


def _run(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine and return its result. Ctrl+C cancels it; pressing Ctrl+C again has no further effect.

    With ``asyncio.run`` alone, a second Ctrl+C would raise KeyboardInterrupt at any point of the event loop, for
    example while the coroutine cleans up after the first.

    Raises:
        KeyboardInterrupt: The coroutine was cancelled.
    """
    import asyncio

    async def cancellable() -> _T:
        usual = signal.getsignal(signal.SIGINT)
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None

        def cancel(_number: int, _frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(task.cancel)

        if current_thread() is main_thread() and callable(usual):
            signal.signal(signal.SIGINT, cancel)
        try:
            return await work
        finally:
            if signal.getsignal(signal.SIGINT) is cancel:
                signal.signal(signal.SIGINT, usual)

    try:
        return asyncio.run(cancellable())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


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
            f"{config}: the configuration has no nvme section; add one with the store's directory as its path"
        )
    return nvme


def _only(shards: Sequence[Shard], path: Path, document: Document | None) -> Shard:
    if len(shards) == 1:
        return shards[0]
    whose = "with this fingerprint" if document is None else f"of {document.model} in {document.dtype}"
    if not shards:
        do = "`tierstore inspect` lists what it has" + ("" if document is None else f". {_READ_FIRST}")
        raise ConfigError(f"{path} has no pages {whose}; {do}")
    there = ", ".join(f"{shard.directory.name[:12]}: {shard.description.models[:40]}" for shard in shards)
    raise ConfigError(
        f"{path} has {len(shards)} directories with pages {whose} ({there}); choose one with --fingerprint"
    )


def _choose(source: ClosedSource, path: Path, listed: list[PageKey] | None, loss_class: str) -> None:
    """Select the loss class whose pages are exported. A file contains pages of one class only.

    Raises:
        ConfigError: The store has no pages of ``loss_class``, or it has several classes and none was chosen.
    """
    found = source.classes(listed)
    there = ", ".join(f"{name}: {count}" for name, count in found.items())
    if loss_class and found and loss_class not in found:
        raise ConfigError(
            f"--loss-class must be one of {', '.join(found)} (the classes of this model's pages in {path}), "
            f"got {loss_class!r}"
        )
    if not loss_class and len(found) > 1:
        raise ConfigError(f"{path} has pages of several loss classes ({there}); choose one with --loss-class")
    if found:
        source.choose(loss_class or next(iter(found)))


def _document(doc: Path, model: str, dtype: str | None, shards: Sequence[Shard]) -> Document:
    if find_spec("transformers") is None:
        raise ConfigError("--doc needs transformers: run pip install 'tierstore[hf]'")
    there = sorted({spec.dtype for shard in shards for spec in shard.description.layout.specs})
    if dtype is None and len(there) > 1:
        raise ConfigError(f"the directory has pages of {' and '.join(there)}; choose one with --dtype")
    progress.print("importing torch and transformers")
    from tierstore.cli.document_keys import Document

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
                f"{path}, line {number}: a key must have {2 * KEY_NBYTES} hex digits, got {text[:80]!r}"
            )
        found.append(PageKey(key))
    if not found:
        raise ConfigError(f"{path} has no keys; it must contain keys in hex, one per line")
    return found


def _say_exported(done: Exported) -> None:
    kept = [
        f"{count} not compressed (codec none)" if name == "none" else f"{count} with codec {name}"
        for name, count in done.codecs.items()
    ]
    typer.echo(f"{done.path}: {format_size(done.nbytes)}, {done.pages} pages: {', '.join(kept)}")
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
    """Show a progress bar on standard error, and yield a function ``update(done, total)`` that updates it."""
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=progress, transient=True, disable=not progress.is_interactive) as bars:
        task = bars.add_task(what, total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
