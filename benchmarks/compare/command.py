"""The command ``compare``: prepares the models, runs all cases with and without the store, and prints the results."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.status import Status

from benchmarks.compare import verdicts
from tierstore.cli.output import print_json, refusals
from tierstore.demo.documents import DocumentError, made_folder, require_texts
from tierstore.demo.model import KNOWN, ModelError, default_cache_dir, model_folder, short_name
from tierstore.errors import ConfigError
from tierstore.gpu.device import require_device

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from benchmarks.compare.verdicts import Row

WIDE = 130
"""Width of the table in columns if the output is not a terminal."""


def run(
    *, model: list[str] | None, docs: list[Path] | None, place: Path | None, device: str, as_json: bool
) -> None:
    """Run the command with the options of ``tierstore compare``. Always raises ``typer.Exit``."""
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = WIDE
    found: list[Row] = []
    with refusals(as_json):
        if find_spec("transformers") is None:
            raise ConfigError("compare needs transformers: run pip install -e '.[hf]' in the checkout")
        if device != "cpu":
            require_device(device)
        require_texts(docs or [])
        home = made_folder(place or default_cache_dir())
        with Status("starting", console=console) as status:

            def say(line: str) -> None:
                status.update(line)
                console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

            for name in model or KNOWN:
                found += _compare(name, docs or [], home, device, say)
    verdicts.show(console, found)
    if as_json:
        print_json(verdicts.as_json(found))
    raise typer.Exit(0 if verdicts.all_held(found) else 1)


def _compare(
    name: str, docs: list[Path], home: Path, device: str, say: Callable[[str], None]
) -> Iterator[Row]:
    """Run all cases of one model, and yield their rows.

    Raises:
        ConfigError: The model or the texts cannot be loaded.
    """
    from benchmarks.compare import cases
    from benchmarks.compare.subject import Sizes, Subject, load_tokenizer, read_texts

    sizes = Sizes()
    try:
        folder = model_folder(name, say)
        say(f"{folder.name}: loading")
        texts = read_texts(load_tokenizer(folder), sizes, docs)
        subject = Subject.load(short_name(name) or folder.name, folder, device)
    except (ModelError, DocumentError, ValueError) as error:
        raise ConfigError(str(error)) from error
    with TemporaryDirectory(prefix="tierstore-compare-", dir=home) as scratch:
        yield from cases.compare(subject, texts, sizes, Path(scratch), say)
