"""The ``doctor`` command, which checks what this machine supports.

There is one function per check. Each check runs even if others fail.
"""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tierstore.cli.output import Json, print_json
from tierstore.types import format_size


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    ``state`` is "ok", "note" (a feature would be slow or unavailable) or "fail" (TierStore would not work at
    all). ``why`` explains a note or a failure and, where possible, says what to do.
    """

    name: str
    value: str
    state: Literal["ok", "note", "fail"] = "ok"
    why: str = ""


def tell(checks: Sequence[Check], as_json: bool, **more: object) -> None:
    """Print all checks and exit the command, with code 1 if a check failed.

    With ``as_json``, also print a JSON object, which includes the fields in ``more``.
    """
    failed = [check.name for check in checks if check.state == "fail"]
    table = Table("", "found", "", "why", box=None, header_style="bold")
    for check in checks:
        table.add_row(check.name, Text(check.value), check.state, Text(check.why))
    Console().print(table)
    if as_json:
        rows = [asdict(check) for check in checks]
        print_json({"ok": not failed, "failed": failed, **more, "checks": rows})
    raise typer.Exit(1 if failed else 0)


PACKAGES = (
    "torch",
    "numpy",
    "lmdb",
    "zstandard",
    "pyyaml",
    "aiofiles",
    "pydantic",
    "xxhash",
    "typer",
    "rich",
)
PACKAGES_OF_EXTRAS = {
    "transformers": "hf",
    "gguf": "hf",
    "cuda-bindings": "gpu",
    "cupy-cuda13x": "gpu",
    "matplotlib": "plot",
}


_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LOCKED_NBYTES = 1 << 20
_PAGE_NBYTES = 1 << 20


def doctor(
    path: Annotated[Path, typer.Option(help="Folder where the NVMe tier would be.")] = Path(),
    as_json: Json = False,
) -> None:
    """Check which features work on this machine, and why others do not. Exit code 1 if TierStore cannot work at all."""
    tell(list(every_check(path.expanduser().absolute())), as_json)


def every_check(path: Path) -> Iterator[Check]:
    """Yield all checks in display order.

    Args:
        path: Intended directory of the NVMe tier. Probe files are created in it, or in its nearest parent that
            exists, and removed.
    """
    yield python()
    yield from packages()
    yield from cuda()
    yield memory()
    yield cores()
    yield huge_pages()
    yield memlock()
    yield from page_locking()
    yield lmdb_library()
    place = next(folder for folder in (path, *path.parents) if os.path.exists(folder))
    yield disk(path, place)
    yield direct_io(place)
    yield from disk_speed(place)


def python() -> Check:
    return Check("Python", platform.python_version())


def packages() -> Iterator[Check]:
    for name in (*PACKAGES, "prometheus_client"):
        version = _version(name)
        yield (
            Check(name, version)
            if version
            else Check(name, "missing", "fail", "reinstall: run pip install tierstore")
        )
    for name, extra in PACKAGES_OF_EXTRAS.items():
        version = _version(name)
        why = f"needed only for the extra {extra}: run pip install 'tierstore[{extra}]'"
        yield Check(name, version) if version else Check(name, "missing", "note", why)


def cuda() -> Iterator[Check]:
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of torch's shared libraries is missing
        yield Check("CUDA devices", "unknown", "fail", f"torch cannot be imported: {error}")
        return
    if not torch.cuda.is_available():
        built = (
            f"torch is built for CUDA {torch.version.cuda}"
            if torch.version.cuda
            else "torch is built for the CPU"
        )
        yield Check("CUDA devices", "none", "note", f"hbm.device must be cpu: {built} and finds no device")
        return
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Check(f"cuda:{index}", f"{properties.name}, {format_size(free)} free of {format_size(total)}")


def memory(root: Path = Path("/")) -> Check:
    """Check how much memory is free, within the limits of the machine and of control groups (containers)."""
    from tierstore.host.free_memory import free_memory

    free = free_memory(root)
    if free is None:
        why = "/proc/meminfo cannot be read, so host.capacity cannot be checked"
        return Check("host memory", "unknown", "note", why)
    return Check(
        "host memory", f"{format_size(free.nbytes)} free of {format_size(free.limit_nbytes)}", why=free.limit
    )


def cores(root: Path = Path("/")) -> Check:
    """Check how many threads ``serve`` and ``demo`` would use to compute on the CPU."""
    from tierstore.host.processors import processors

    found = processors(root)
    value = f"{found.described()}: {found.free} thread{'' if found.free == 1 else 's'} for computing"
    if found.free >= found.cores:
        return Check("processors", value)
    why = (
        "a model on the CPU uses only as many threads as there are free cores, because threads that wait for a "
        "core slow down the others; end other programs, raise the limit, or set --threads"
    )
    return Check("processors", value, "note", why)


def huge_pages(path: Path = _HUGE_PAGES) -> Check:
    """Check whether the system gives huge pages to programs that request them."""
    why = "memory is in small pages, so fast disks are read at only a third to a half of their speed"
    try:
        allowed = path.read_text(encoding="ascii")
    except OSError as error:
        return Check("huge pages", "none", "note", f"{path}: {error.strerror}: {why}")
    chosen = allowed.partition("[")[2].partition("]")[0]
    if chosen in ("always", "madvise"):
        return Check("huge pages", chosen)
    return Check("huge pages", chosen or "unknown", "note", f"{why}: run echo madvise > {path} as root")


def memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("memlock limit", "unlimited")
    why = "mlock() cannot lock more memory than this (CUDA can): to raise the limit, run ulimit -l unlimited"
    return Check("memlock limit", format_size(soft), "note", why)


def page_locking() -> Iterator[Check]:
    """Check whether host memory can be page-locked for the first GPU. Yields nothing without a GPU."""
    try:
        import torch

        from tierstore.gpu.driver import CudaPinner
    except (ImportError, OSError):
        return  # cuda() has already reported this
    if not torch.cuda.is_available():
        return
    block, pinner = torch.empty(_LOCKED_NBYTES, dtype=torch.uint8), CudaPinner(0)
    try:
        pinner.pin(block.data_ptr(), _LOCKED_NBYTES)
    except OSError as error:
        yield Check("page-locked memory", "refused", "note", f"copies to and from HBM will be slow: {error}")
        return
    pinner.unpin(block.data_ptr())
    yield Check("page-locked memory", "works")


def lmdb_library() -> Check:
    try:
        import lmdb
    except (ImportError, OSError) as error:
        return Check("LMDB", "unknown", "fail", f"lmdb cannot be imported: {error}")
    return Check("LMDB", ".".join(str(part) for part in lmdb.version()))


def disk(path: Path, place: Path) -> Check:
    where = str(path) if place == path else f"{path} (does not exist yet; {place} does)"
    try:
        space = os.statvfs(place)
    except OSError as error:
        return Check("disk", where, "fail", f"{place}: {error.strerror}")
    free = f"{where}: {format_size(space.f_bavail * space.f_frsize)} free"
    if not place.is_dir():
        return Check("disk", free, "fail", f"{place} is not a directory")
    if not os.access(place, os.W_OK | os.X_OK):
        return Check("disk", free, "fail", f"{place} cannot be written to")
    return Check("disk", free)


def direct_io(place: Path) -> Check:
    """Check whether direct I/O works in the folder ``place``: run the NVMe tier's self-test on a probe file."""
    from tierstore.nvme.direct_io import round_trip

    try:
        handle, name = tempfile.mkstemp(prefix=".tierstore-probe-", dir=place)
    except OSError as error:
        return Check("O_DIRECT", "not tried", "fail", f"cannot create a file in {place}: {error.strerror}")
    try:
        works = round_trip(handle)
    except OSError as error:
        return Check("O_DIRECT", "no", "note", f"reads go through the page cache: {error.strerror}")
    finally:
        os.close(handle)
        os.unlink(name)
    return (
        Check("O_DIRECT", "works")
        if works
        else Check("O_DIRECT", "wrong bytes", "fail", "do not use this disk")
    )


def disk_speed(place: Path) -> Iterator[Check]:
    """Measure the disk speeds from which the NVMe tier derives its ``auto`` settings.

    Writes and reads 32 MiB in a temporary file in ``place``. Yields nothing if direct I/O does not work.
    """
    from tierstore.nvme import disk_probe

    try:
        with tempfile.TemporaryFile(prefix=".tierstore-probe-", dir=place) as file:
            rates = disk_probe.rates(file.fileno(), _PAGE_NBYTES)
    except OSError:
        return  # disk() or direct_io() has already reported this
    yield Check("disk writes", f"{rates.write / 1e9:.2f} GB/s")
    best = rates.reads[rates.readers]
    yield Check("disk reads", f"{best / 1e9:.2f} GB/s; nvme.readers auto: {rates.readers}")


def _version(package: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
