"""The ``serve`` command, which runs the HTTP server with one model and one store."""

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
from tierstore.demo.model import ALLOWED, model_folder, require_model, short_name
from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tierstore.config import StoreConfig
    from tierstore.host.processors import Threads
    from tierstore.page import PageSpec
    from tierstore.serve.auth import Tenants
    from tierstore.serve.model import Reader

PAGE_SIZE = 64
"""Number of tokens per page if the configuration does not set ``page_size``."""


class Dtype(StrEnum):
    """Dtype to which the weights are converted when they are loaded. ``auto`` keeps the stored dtype."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum numbers of running and of waiting requests in the engine."""

    max_active: int
    max_waiting: int


def serve(
    config: Annotated[
        Path,
        typer.Option(help="YAML file with the store's configuration. The model also runs on hbm.device."),
    ],
    model: Annotated[str, typer.Option(help=ALLOWED)],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 picks a free one.")
    ] = 8000,
    documents: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the texts of documents; without it, texts are lost when the server stops."
        ),
    ] = None,
    keys: Annotated[
        Path | None, typer.Option(help="YAML file with tenants and the SHA-256 digests of their keys.")
    ] = None,
    for_all: Annotated[
        bool, typer.Option("--open", help="Without --keys, answer anyone who can reach the address.")
    ] = False,
    max_active: Annotated[int, typer.Option(min=1, help="Maximum number of running requests.")] = 4,
    max_waiting: Annotated[int, typer.Option(min=1, help="Maximum number of waiting requests.")] = 64,
    dtype: Annotated[Dtype, typer.Option(help="dtype of the weights; auto keeps it as stored.")] = Dtype.auto,
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of threads for an operation on the CPU. Default: the number of cores that are free now.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Serve completions, chats and questions about documents over HTTP.

    Completions and chats are compatible with OpenAI's API. On a web page, users can add documents and ask
    about them. Exits within seconds on Ctrl-C or SIGTERM, after writing all pages accepted for the disk.
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
        _require_folders(model, documents)
        bound = stack.enter_context(_bound(host, port))
        progress.print("importing torch and transformers")
        limits = Limits(max_active, max_waiting)
        hosts = _hosts(host, tenants, for_all=for_all)
        _require_device(settings)
        used = _use_threads(settings, threads)
        reader = _reader(model, settings, dtype)
        _run(settings, reader, documents, tenants, limits, bound, hosts, used, as_json)


def _require_extras() -> None:
    missing = [name for name in ("transformers", "fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {', '.join(missing)}: run pip install 'tierstore[hf,serve]'")


def _settings(file: Path) -> StoreConfig:
    from tierstore.config import load_config

    settings = load_config(file)
    if settings.hbm is None:
        raise ConfigError(
            f"{file}: the configuration needs an hbm section, which sets the memory for the model's K and V"
        )
    if settings.hbm.owner != "store":
        raise ConfigError(f"{file}: hbm.owner must be 'store', got {settings.hbm.owner!r}")
    return settings


def _require_folders(model: str, documents: Path | None) -> None:
    """Raise ConfigError if the model or the documents folder cannot be used. Does not import torch."""
    require_model(model)
    if documents is not None and documents.exists() and not documents.is_dir():
        raise ConfigError(
            f"--documents {documents} is not a folder; name an existing folder, or a new one, which will be created"
        )


def _require_device(settings: StoreConfig) -> None:
    from tierstore.gpu.device import require_device

    assert settings.hbm is not None
    require_device(settings.hbm.device)


def _use_threads(settings: StoreConfig, wanted: int | None) -> Threads | None:
    from tierstore.host.processors import use_threads

    assert settings.hbm is not None
    return use_threads(settings.hbm.device, wanted)


def _reader(model: str, settings: StoreConfig, dtype: Dtype) -> Reader:
    assert settings.hbm is not None
    folder = model_folder(model, progress.print)
    from tierstore.serve.model import Reader

    name = short_name(model) or folder.resolve().name
    progress.print(f"loading {name}", highlight=False, soft_wrap=True)
    return Reader.load(folder, settings.hbm.device, dtype.value, name)


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
    """Open the store and serve until the process receives Ctrl+C or SIGTERM. Then close the store."""
    from tierstore.nvme.directory_layout import missing_folders, remove_empty
    from tierstore.prefetch import Prefetcher
    from tierstore.serve.app import Server, make_app
    from tierstore.serve.documents import Library
    from tierstore.serve.engine import Engine
    from tierstore.store import TierStore

    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("tierstore.serve").setLevel(logging.INFO)
    made = () if documents is None else missing_folders(documents.absolute())
    try:
        library = Library(documents)
        progress.print("hashing the weights, because the page keys contain their digest")
        specs = _specs(reader, settings)
        progress.print("opening the store")
        opened = TierStore.open(settings, specs, name=reader.name)
    except BaseException:
        remove_empty(made)
        raise

    def listening() -> None:
        if threads is not None:
            progress.print(threads.described(), highlight=False, soft_wrap=True)
        address, port = bound.getsockname()[:2]
        url = f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        if as_json:
            print_json({"url": url, "model": reader.name, "max_tokens": engine.max_tokens})
        else:
            typer.echo(f"{reader.name} answers at {url}")

    with opened as store, Prefetcher.attach(store):
        engine = Engine(reader, store, max_active=limits.max_active, max_waiting=limits.max_waiting)
        try:
            app = make_app(reader, engine, store, library, tenants, hosts=hosts)
            gc.freeze()  # full collections pause all threads; they need not scan the objects that exist now
            Server(app, engine, listening).run(sockets=[bound])
        finally:
            gc.unfreeze()  # otherwise some libraries report memory leaks at exit
            engine.close()


def _specs(reader: Reader, settings: StoreConfig) -> tuple[PageSpec, ...]:
    from tierstore.adapters.huggingface import page_specs

    try:
        return page_specs(reader.model, settings.page_size or PAGE_SIZE)
    except ValueError as error:
        raise ConfigError(f"--model {reader.name}: {error}") from error


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _hosts(host: str, tenants: Tenants, *, for_all: bool) -> tuple[str, ...]:
    """Return the accepted values of the Host header.

    If the server needs no keys, only names of this machine are accepted. Otherwise a website could make its own
    name resolve to this machine and let its visitors' browsers use the server.
    """
    if for_all or not tenants.open:
        return ("*",)
    from tierstore.serve.app import LOOPBACK

    return (*LOOPBACK, f"[{host}]" if ":" in host else host)


@contextmanager
def _bound(host: str, port: int) -> Iterator[socket.socket]:
    """Bind a socket to the address for the duration of the ``with`` block, and yield it.

    This is done before the model is loaded, so that a wrong address is reported at once.

    Raises:
        ConfigError: The address is invalid or in use.
    """
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
