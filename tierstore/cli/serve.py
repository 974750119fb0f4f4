"""``serve``: answer over HTTP with one model over one store."""

from __future__ import annotations

import gc
import logging
import socket
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib.util import find_spec
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tierstore.cli.output import Json, print_json, progress, refusals
from tierstore.demo.model import ALLOWED, short_name
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.config import StoreConfig
    from tierstore.host.processors import Threads
    from tierstore.serve.auth import Tenants
    from tierstore.serve.model import Reader

PAGE_SIZE = 64
"""Tokens per page if the configuration does not say."""


class Dtype(StrEnum):
    """dtype of the loaded weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the engine."""

    max_active: int
    max_waiting: int


def serve(
    config: Annotated[
        Path,
        typer.Option(help="Configuration of the store, a YAML file. The model runs on its hbm.device, too."),
    ],
    model: Annotated[str, typer.Option(help=ALLOWED)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    documents: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the texts of documents; without it they are lost when the server ends."
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="YAML file with tenants and the SHA-256 of their keys.")
    ] = None,
    for_all: Annotated[
        bool, typer.Option("--open", help="Without --keys, answer anyone who can reach the address.")
    ] = False,
    max_active: Annotated[int, typer.Option(min=1, help="Requests to compute at a time.")] = 4,
    max_waiting: Annotated[int, typer.Option(min=1, help="Requests that may wait; more are refused.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="dtype of the weights; auto: as stored.")] = Dtype.auto,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1, help="Threads of one operation on the CPU. By default as many as cores are free now."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Answer over HTTP: OpenAI-compatible completions and chats, questions about documents, and a web page for both.

    Ends within seconds on Ctrl-C or SIGTERM, after pages accepted for the disk are written. See docs/server.md.
    """
    with refusals(as_json), ExitStack() as stack:
        _require_extras()
        from tierstore.serve.auth import Tenants

        tenants = Tenants() if keys is None else Tenants.load(keys)
        settings = _settings(config)
        if tenants.open and not for_all and not _is_loopback(host):
            raise ConfigError(
                f"--host {host} can be reached from other machines: use a loopback address, --keys FILE, or --open to "
                "answer anyone"
            )
        bound = stack.enter_context(_bound(host, port))
        limits = Limits(max_active, max_waiting)
        hosts = _hosts(host, tenants, for_all=for_all)
        used = _use_threads(settings, threads)
        reader = _reader(model, settings, dtype)
        _run(settings, reader, documents, tenants, limits, bound, hosts, used, as_json)


def _require_extras() -> None:
    missing = [name for name in ("transformers", "fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"serve needs {', '.join(missing)}: run pip install -e '.[hf,serve]' in the checkout"
        )


def _settings(file: Path) -> StoreConfig:
    from tierstore.config import load_config

    settings = load_config(file)
    if settings.hbm is None:
        raise ConfigError(
            f"{file}: the configuration needs an hbm section, where the model's K and V are computed"
        )
    if settings.hbm.owner != "store":
        raise ConfigError(f"{file}: hbm.owner must be 'store', got {settings.hbm.owner!r}")
    if settings.hbm.device != "cpu":
        from tierstore.gpu.device import require_device

        require_device(settings.hbm.device)
    return settings


def _use_threads(settings: StoreConfig, wanted: int | None) -> Threads | None:
    from tierstore.host.processors import use_threads

    assert settings.hbm is not None
    return use_threads(settings.hbm.device, wanted)


def _reader(model: str, settings: StoreConfig, dtype: Dtype) -> Reader:
    from tierstore.demo.model import ModelError, model_folder
    from tierstore.serve.model import Reader

    assert settings.hbm is not None
    try:
        folder = model_folder(model, progress.print)
    except ModelError as error:
        raise ConfigError(str(error)) from error
    return Reader.load(folder, settings.hbm.device, dtype.value, short_name(model) or folder.resolve().name)


def _run(
    settings: StoreConfig,
    reader: Reader,
    documents: Path | None,
    tenants: Tenants,
    limits: Limits,
    bound: socket.socket,
    hosts: tuple[str, ...],
    threads: Threads | None,
    as_json: bool,
) -> None:
    """Serve until the process is told to end."""
    from prefetch import Prefetcher
    from tierstore.adapters.huggingface import page_specs
    from tierstore.serve.app import Server, make_app
    from tierstore.serve.documents import Library
    from tierstore.serve.engine import Engine
    from tierstore.store import TierStore

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("tierstore.serve").setLevel(logging.INFO)
    library = Library(documents)
    try:
        specs = page_specs(reader.model, settings.page_size or PAGE_SIZE)
    except ValueError as error:
        raise ConfigError(f"--model {reader.name}: {error}") from error

    def listening() -> None:
        if threads is not None:
            progress.print(threads.described(), highlight=False, soft_wrap=True)
        address, port = bound.getsockname()[:2]
        url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        if as_json:
            print_json({"url": url, "model": reader.name, "max_tokens": engine.max_tokens})
        else:
            typer.echo(f"{reader.name} answers at {url}")

    with TierStore.open(settings, specs) as store, Prefetcher.attach(store):
        engine = Engine(reader, store, max_active=limits.max_active, max_waiting=limits.max_waiting)
        try:
            app = make_app(reader, engine, store, library, tenants, hosts=hosts)
            gc.freeze()  # a full garbage collection stops every thread; objects that exist now are here to stay
            Server(app, engine, listening).run(sockets=[bound])
        finally:
            gc.unfreeze()  # otherwise libraries report leaks at exit
            engine.close()


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(host: str, tenants: Tenants, *, for_all: bool) -> tuple[str, ...]:
    """Return the host names that requests may address.

    Without keys, a web page from elsewhere must not reach the server through a name of its own that points to this
    machine.
    """
    if for_all or not tenants.open:
        return ("*",)
    from tierstore.serve.app import LOOPBACK

    return (*LOOPBACK, f"[{host}]" if ":" in host else host)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind the socket before a model is loaded for it. ConfigError if the address cannot be bound."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"--host {host}: cannot listen there: {error.strerror}") from error
    with found:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            found.bind(address)
        except OSError as error:
            raise ConfigError(
                f"--host {host} --port {port}: cannot listen there: {error.strerror}"
            ) from error
        yield found
