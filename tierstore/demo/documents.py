"""Finds long real texts: the user's own files, or licences and files of installed packages on this machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from tierstore.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COMMON_LICENCES = Path("/usr/share/common-licenses")
_SUFFIXES = (".txt", ".md", ".rst")
_PACKAGE_FILES = re.compile(
    r"(METADATA|(LICEN[CS]E|COPYING|NOTICE|AUTHORS|CHANGES|CHANGELOG)[^/]*)$", re.IGNORECASE
)
_LONG_ENOUGH = 6_000  # characters; shorter texts have fewer than about 2,000 tokens


class DocumentError(RuntimeError):
    """Not enough long texts were found, or a path does not exist. The message says what to do."""


@dataclass(frozen=True, slots=True)
class Document:
    """A text that was cut to the requested length. ``num_tokens`` is the length in tokens, without a question."""

    name: str
    text: str
    num_tokens: int


def find_documents(
    tokenizer: PreTrainedTokenizerBase,
    count: int,
    min_tokens: int,
    max_tokens: int,
    paths: Sequence[Path] = (),
) -> list[Document]:
    """Return ``count`` different texts with ``min_tokens`` to ``max_tokens`` tokens.

    If the files are the same, every call returns the same texts.

    Args:
        tokenizer: The tokenizer that counts tokens.
        count: Number of texts.
        min_tokens: Minimum number of tokens per text.
        max_tokens: Maximum number of tokens per text.
        paths: Files or folders to use instead of this machine's texts. A long file becomes several documents.

    Raises:
        DocumentError: There are too few texts, or one of ``paths`` does not exist.
    """
    found: list[Document] = []
    parts = _own_parts(paths) if paths else _machine_parts()
    for name, text in parts:
        for document in _cut(tokenizer, name, text, min_tokens, max_tokens, all_of_it=bool(paths)):
            found.append(document)
            if len(found) == count:
                return found
    where = ", ".join(map(str, paths)) or "the licences and package files of this machine"
    strange = [str(path) for path in _own_files(paths) if path.stat().st_size and not _read(path)]
    more = f", {len(strange) - 3} more" if len(strange) > 3 else ""
    raise DocumentError(
        f"{where}: found {len(found)} documents of at least {min_tokens} tokens, but {count} are needed. "
        + (f"Not UTF-8 text: {', '.join(strange[:3])}{more}. " if strange else "")
        + "Pass longer or more text files with --docs."
    )


def _machine_parts() -> Iterator[tuple[str, str]]:
    """Yield pairs of name and text, alternating between this machine's licences and its package files.

    Texts that are short, or that share at least half of their phrases with earlier texts, are skipped.
    """
    seen: set[str] = set()
    turns = zip_longest(_licences(), _package_files())
    for path in filter(None, chain.from_iterable(turns)):
        text = _read(path)
        phrases = _phrases(text[:_LONG_ENOUGH])
        if len(text) >= _LONG_ENOUGH and len(phrases & seen) * 2 < len(phrases):
            seen |= phrases
            yield _name(path), text


def _phrases(text: str) -> set[str]:
    """Return all sequences of six consecutive words in a text."""
    words = text.split()
    return {" ".join(words[i : i + 6]) for i in range(len(words) - 5)}


def _own_parts(paths: Sequence[Path]) -> Iterator[tuple[str, str]]:
    return ((file.name, _read(file)) for file in _own_files(paths))


def _own_files(paths: Sequence[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
        elif path.is_file():
            yield path
        else:
            raise DocumentError(f"{path} does not exist")


def _licences() -> Iterator[Path]:
    """Yield the licence files of the operating system, sorted by name. Symbolic links are skipped."""
    if COMMON_LICENCES.is_dir():
        yield from (
            path for path in sorted(COMMON_LICENCES.iterdir()) if path.is_file() and not path.is_symlink()
        )


def _package_files() -> Iterator[Path]:
    """Yield licence, changelog and metadata files of installed packages, sorted by path."""
    import importlib.metadata

    distributions: Iterable[importlib.metadata.Distribution] = importlib.metadata.distributions()
    files = chain.from_iterable(distribution.files or () for distribution in distributions)
    wanted = (file for file in files if _PACKAGE_FILES.search(str(file)) and ".dist-info" in str(file))
    yield from sorted({Path(str(file.locate())) for file in wanted})


def _name(path: Path) -> str:
    """Return a short name for a file, such as "GPL-3" for a licence or "numpy/METADATA" for a file of a package."""
    package = next((part for part in path.parts if part.endswith(".dist-info")), None)
    return f"{package.split('-')[0]}/{path.name}" if package else path.name


def _read(path: Path) -> str:
    """Return the text of a file, or an empty string if it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def _cut(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    text: str,
    min_tokens: int,
    max_tokens: int,
    *,
    all_of_it: bool,
) -> Iterator[Document]:
    """Cut a text into parts of ``min_tokens`` to ``max_tokens`` tokens.

    Yield only the first part or, with ``all_of_it``, all parts. If a paragraph ends in the last tenth of a part,
    the part is cut there.
    """
    part = 0
    while len(text) > min_tokens:
        # Tokenize only as much text as a part may need, because tokens have at most 16 characters on average.
        ends = _token_ends(tokenizer, text[: max_tokens * 16])[:max_tokens]
        if len(ends) < min_tokens:
            return
        piece = text[: ends[-1]]
        paragraph = piece.rfind("\n\n", int(len(piece) * 0.9))
        piece = piece[:paragraph] if paragraph > 0 else piece
        num_tokens = len(_token_ends(tokenizer, piece))
        if num_tokens >= min_tokens:
            part += 1
            yield Document(name if part == 1 else f"{name} [{part}]", piece, num_tokens)
        if not all_of_it:
            return
        text = text[len(piece) :]


def _token_ends(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return, for each token of ``text``, the position in characters at which it ends."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [int(end) for _, end in encoded["offset_mapping"]]


def require_texts(docs: Sequence[Path], *, folders: bool = True) -> None:
    """Raise ConfigError unless every path given with ``--docs`` is a file or, if ``folders`` is true, a folder.

    The files are not read.
    """
    for path in docs:
        if path.is_file() or (folders and path.is_dir()):
            continue
        found = "is a folder" if path.is_dir() else "is not a file" if path.exists() else "does not exist"
        more = ", and folders of them" if folders else ""
        raise ConfigError(f"--docs {path} {found}, expected text files{more}")


def made_folder(place: Path) -> Path:
    """Create the folder given with ``--dir`` if it does not exist, and return it.

    Raises:
        ConfigError: The folder cannot be created.
    """
    try:
        place.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is not a folder" if place.exists() else error.strerror
        raise ConfigError(f"--dir {place} cannot be used: {why}") from error
    return place
