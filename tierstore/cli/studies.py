"""The commands ``compare``, ``bench engine`` and ``bench hints``, which run studies from ``benchmarks/``.

They need a checkout of the repository. If only the wheel is installed, they are listed in the help text, but exit
with an error saying that a checkout is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli.bench import Device
from tierstore.cli.output import Json, refusals, study
from tierstore.demo.model import ALLOWED

PAGE_SIZE = 64
"""Number of tokens per page in ``bench hints``."""


def compare(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{ALLOWED}; may be repeated. Default: all known models."),
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders to read instead of licence texts from this machine."),
    ] = None,
    place: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for the disk tier; a subfolder is created and removed."),
    ] = None,
    device: Annotated[
        str, typer.Option(help="Device of the models and of HBM: cpu, cuda or cuda:N, as in hbm.device.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Check that answers computed with the store are equal to those of plain transformers.

    The cases cover greedy decoding, batches, sampling, beam search, draft models, chunks and rollbacks.

    Every answer is compared with one from transformers' own cache, token by token, in float32. The command
    also checks that the model computes only tokens that were not reused. It prepares the models on first use.
    Exit code 1 if a case differs.
    """
    with refusals(as_json):
        module = study("compare.command")
    module.run(model=model, docs=docs, place=place, device=device, as_json=as_json)


def engine(
    device: Device = "cuda:0",
    blocks: Annotated[int, typer.Option(min=2, help="Blocks per batch.")] = 2048,
    layouts: Annotated[
        str,
        typer.Option(
            help="Physical orders of the layers, separated by commas. Default: all that vLLM has used."
        ),
    ] = "",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    heads: Annotated[int, typer.Option(min=1, help="KV heads of the model.")] = 8,
    dim: Annotated[int, typer.Option(min=1, help="Dimension of a KV head.")] = 128,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens per block.")] = 16,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of copies; the median is reported.")] = 5,
    as_json: Json = False,
) -> None:
    """Measure how fast the vLLM connector's worker copies blocks out of the engine's memory and back.

    The rate is compared with that of one contiguous copy.
    """
    with refusals(as_json):
        module = study("engine")
    module.run(
        device=device,
        blocks=blocks,
        layouts=layouts,
        layers=layers,
        heads=heads,
        dim=dim,
        block_size=block_size,
        pairs=pairs,
        as_json=as_json,
    )


def hints(
    model: Annotated[
        str,
        typer.Option(
            help="none: pages only, an answer is a lease that is ready. smollm2, or a model's folder: real answers in "
            "float32. random: a Llama with the shape of 8B and random weights over random pages."
        ),
    ] = "none",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N, as in hbm.device.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=PAGE_SIZE, help="Length of a document in tokens.")] = 4096,
    disk_tokens: Annotated[
        int | None,
        typer.Option(
            min=PAGE_SIZE, help="Length in tokens of a document on disk, if it differs from --tokens."
        ),
    ] = None,
    documents: Annotated[
        int, typer.Option(min=1, help="Number of documents. They are requested in turn.")
    ] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model if it is none or random.")] = 32,
    sources: Annotated[
        str, typer.Option("--from", help="Where the documents are initially: nvme, host, or both.")
    ] = "nvme,host",
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds over all documents and cases; medians are reported.")
    ] = 5,
    docs: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text files to use as documents of a real model. Default: licence texts from this machine."
        ),
    ] = None,
    place: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for the disk tier; a subfolder is created and removed."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure how soon a request for a document outside HBM is answered, with and without hints.

    Requests without a hint, with a late hint and with an early hint are compared with one whose document is in HBM.
    Pages are really copied. ``ratio`` is the time divided by the best possible time.
    """
    with refusals(as_json):
        module = study("hints")
    module.run(
        model=model,
        device=device,
        tokens=tokens,
        disk_tokens=disk_tokens,
        documents=documents,
        layers=layers,
        sources=sources,
        rounds=rounds,
        docs=docs,
        place=place,
        as_json=as_json,
    )
