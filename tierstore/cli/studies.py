"""The commands whose work is in ``benchmarks/`` of a checkout: ``compare``, ``bench engine`` and ``bench hints``.

An installed wheel knows these commands, says what they need, and refuses them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tierstore.cli.bench import Device
from tierstore.cli.output import Json, refusals, study
from tierstore.demo.model import ALLOWED

PAGE_SIZE = 64
"""Tokens of a page of ``bench hints``."""


def compare(
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"{ALLOWED}; may be repeated. All known ones if not given."),
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files or folders to read instead of this machine's licences."),
    ] = None,
    place: Annotated[
        Path | None, typer.Option("--dir", help="Where the disk tier goes; a folder in it comes and goes.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="Where the models compute and HBM is: cpu, cuda or cuda:N, as in hbm.device.")
    ] = "cpu",
    as_json: Json = False,
) -> None:
    """Real models answer over the store as without it: greedy, batches, samples, beams, drafts, chunks, rollbacks.

    Each answer is held against transformers' own cache, token by token, in float32, and what the model
    computed against what was not reused. Prepares the models on first use. Exit code 1 if a case differs.
    """
    with refusals(as_json):
        module = study("compare.command")
    module.run(model=model, docs=docs, place=place, device=device, as_json=as_json)


def engine(
    device: Device = "cuda:0",
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of a batch.")] = 2048,
    layouts: Annotated[
        str, typer.Option(help="Physical orders, with commas; all that vLLM has had if empty.")
    ] = "",
    layers: Annotated[int, typer.Option(min=1, help="Layers of the model.")] = 32,
    heads: Annotated[int, typer.Option(min=1, help="Its KV heads.")] = 8,
    dim: Annotated[int, typer.Option(min=1, help="Their dimension.")] = 128,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a block.")] = 16,
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of copies; the median counts.")] = 5,
    as_json: Json = False,
) -> None:
    """An engine's blocks out and back by the connector's worker, as a share of one contiguous copy of as many bytes."""
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
            help="none: pages alone, an answer is a lease that is ready. smollm2, or the folder of a model: what it "
            "answers, in float32. random: a Llama of 8B shape and random weights over pages of random numbers."
        ),
    ] = "none",
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N, as in hbm.device.")] = "cpu",
    tokens: Annotated[int, typer.Option(min=PAGE_SIZE, help="Of a document.")] = 4096,
    disk_tokens: Annotated[
        int | None,
        typer.Option(min=PAGE_SIZE, help="Of one that lies on disk, if others than --tokens."),
    ] = None,
    documents: Annotated[int, typer.Option(min=1, help="Asked in turn.")] = 1,
    layers: Annotated[int, typer.Option(min=1, help="Of the model, where it is none or random.")] = 32,
    sources: Annotated[
        str, typer.Option("--from", help="Where documents lie: nvme, host, or both.")
    ] = "nvme,host",
    rounds: Annotated[
        int, typer.Option(min=1, help="Every case once a round and document; medians count.")
    ] = 5,
    docs: Annotated[
        list[Path] | None,
        typer.Option(help="Text files for a model's documents; the licences here if not given."),
    ] = None,
    place: Annotated[
        Path | None, typer.Option("--dir", help="Where the disk tier goes; a folder in it comes and goes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Asks documents that lie below HBM: no hint, a hint half of the loading time before, one longer than that before.

    Beside it the same document in HBM. Real copies; ``ratio`` is to the best there can be, see ``HintRow``.
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
