"""Digests of a model's files: weights, configuration and LoRA adapters. They tell an engine's models apart.

Files with weights are large, so samples of them are digested. Models of the Hugging Face hub are looked up in the
local cache, and identified by their commit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from tierstore.errors import ConfigError

_SAMPLES = 16
_SAMPLE_NBYTES = 64 << 10
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_CONFIG_FILES = ("config.json", "params.json", "hf_quant_config.json", "quantize_config.json", "*.py")
_ALL_OF_ADAPTER = 256 << 20
"""Maximum size of an adapter file that is digested completely. Larger files are sampled."""
_OF_ADAPTER = ("adapter_config.json", *_WEIGHTS)

Signature = tuple[tuple[str, int, int, int, int], ...]
"""Name, size, inode and times of each file of an adapter.

Equal signatures are assumed to mean equal contents.
"""


def weights_digest(path: Path) -> str:
    """Return a hex digest of the weight files in a directory, or of one file.

    It covers the name, the size and samples of each file. The samples are the first 64 KiB, where safetensors
    files have their header, the last 64 KiB, and 14 pieces of that size in between.
    """
    files = [path] if path.is_file() else sorted(f for kind in _WEIGHTS for f in path.glob(kind))
    digest = sha256()
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogatepass"))
        _feed_samples(digest, file, size)
    return digest.hexdigest()


def model_digest(name: str, revision: str | None = None, cache: str | None = None) -> str:
    """Return a hex digest of a model's weights and configuration files, or "" if they are not on this machine.

    For a model of the Hugging Face hub, the digest also covers the commit, so it changes when a branch moves to
    another commit.

    Args:
        name: A directory, a file with weights, or the name of a model of the hub.
        revision: A branch, tag or commit of the hub. By default, the branch main.
        cache: The directory of a cache of the hub to look in first. The default cache is always looked in.
    """
    folder, commit = Path(name).expanduser(), ""
    if folder.is_file():
        return weights_digest(folder)
    if not folder.is_dir():
        places = (hub_folder(name, file, revision, cache) for file in _CONFIG_FILES if "*" not in file)
        found = next((place for place in places if place is not None), None)
        if found is None:
            return ""
        folder, commit = found, found.name
    digest = sha256((weights_digest(folder) + commit).encode())
    for path in sorted({each for kind in _CONFIG_FILES for each in folder.glob(kind)}):
        content = path.read_bytes()
        digest.update(f"{path.name}\0{len(content)}\0".encode("utf-8", "surrogatepass") + content)
    return digest.hexdigest()


def hub_folder(name: str, file: str, revision: str | None, cache: str | None) -> Path | None:
    """Return the directory in which a cache of the Hugging Face hub has this file of a model, or None.

    The directory has the name of the commit. The cache in the directory ``cache`` is looked in before the default one.
    """
    try:
        from huggingface_hub import try_to_load_from_cache

        for place in (cache, None) if cache else (None,):
            found = try_to_load_from_cache(name, file, cache_dir=place, revision=revision)
            if isinstance(found, str):
                return Path(found).parent
    except (ImportError, ValueError):  # ValueError: not the name of a hub model
        pass
    return None


def _files_of_adapter(folder: Path) -> list[Path]:
    return sorted({file for kind in _OF_ADAPTER for file in folder.glob(kind)})


def adapter_signature(folder: Path) -> Signature | None:
    """Return the signature of a directory, or None if it has no weights or a file cannot be examined."""
    try:
        found = [(file.name, file.stat()) for file in _files_of_adapter(folder)]
    except OSError:
        return None
    if not any(name != _OF_ADAPTER[0] for name, _ in found):
        return None
    return tuple((name, s.st_size, s.st_ino, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)


def adapter_digest(folder: Path, signature: Signature) -> str | None:
    """Return a digest of the files, or None if they cannot be read or no longer have ``signature``."""
    digest = sha256()
    try:
        for file in _files_of_adapter(folder):
            size = file.stat().st_size
            digest.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogatepass"))
            if size > _ALL_OF_ADAPTER:
                _feed_samples(digest, file, size)
            else:
                digest.update(file.read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if adapter_signature(folder) == signature else None


def adapters_digest(folders: Sequence[Path]) -> str:
    """Return a hex digest of several adapters' files, independent of the order of ``folders``.

    Raises:
        ConfigError: A directory has no readable adapter files.
    """
    found = []
    for folder in folders:
        signature = adapter_signature(folder)
        digest = None if signature is None else adapter_digest(folder, signature)
        if digest is None:
            raise ConfigError(
                f"adapters: {folder} is not a folder with readable adapter files; list only folders of LoRA adapters"
            )
        found.append(digest)
    return sha256("".join(sorted(found)).encode()).hexdigest() if found else ""


def _feed_samples(digest: hashlib._Hash, file: Path, size: int) -> None:
    with file.open("rb") as stream:
        for i in range(_SAMPLES):
            stream.seek(max(0, size - _SAMPLE_NBYTES) * i // (_SAMPLES - 1))
            digest.update(stream.read(_SAMPLE_NBYTES))
