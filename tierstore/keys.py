"""Page keys: the identity of a page in every tier, in every process and after every restart.

A key is a digest of everything that the page's bytes depend on: the namespace (model, dtype, layout), the
tenant's salt, extras such as LoRA adapters and images, and all tokens up to the end of the page. The digest
of a page includes the digest of its parent. Equal keys therefore mean equal prefixes, and the pages of a
prefix have the same keys in every sequence that starts with it. Every field is tagged and length-prefixed, so
different inputs are never encoded to the same bytes. All functions are pure: they use no clock, no random
seed and no I/O.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np

from tierstore.page import PageSpec
from tierstore.types import PageKey

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Array(Protocol):
    """Any object that NumPy can read as an array: an ndarray, or a torch tensor in host memory."""

    def __array__(self) -> NDArray[Any]: ...


TokenIds: TypeAlias = Sequence[int] | Array
"""Token ids, each of which fits in int64. An array or tensor must be 1-D and have an integer dtype."""

Extra: TypeAlias = str | bytes | int | tuple[int, bytes]
"""A value that K and V depend on in addition to the tokens. A str, bytes or int applies to the whole
sequence. A pair ``(token_offset, bytes)`` applies to the token at the offset and all later ones.
"""

SCHEME = "tierstore-keys-1"
"""Name of the key scheme. It is part of every key.

It must change whenever the same arguments would give different keys. Pages that were stored under an
older scheme are then never found.
"""

KEY_NBYTES = 36
"""Length of every ``PageKey`` in bytes."""

_INT64 = range(-(1 << 63), 1 << 63)


EXACT = "exact"
"""Loss class of pages that are bit for bit as they were put. The namespace omits this loss class."""


def namespace(specs: PageSpec | Sequence[PageSpec], *, loss_class: str = EXACT) -> bytes:
    """Return the 32-byte namespace of a store's pages.

    Two namespaces are equal only if the specs have equal fingerprints in the same order, and the loss classes
    are equal.

    Args:
        specs: The PageSpec of each KV group.
        loss_class: Loss class of the codecs that pages pass through. Pages of different loss classes have
            different keys.

    Raises:
        ValueError: ``specs`` is empty.
    """
    groups = (specs,) if isinstance(specs, PageSpec) else tuple(specs)
    if not groups:
        raise ValueError("specs must have at least one PageSpec, got none")
    fields = [_field(b"f", spec.fingerprint.encode()) for spec in groups]
    if loss_class != EXACT:
        fields.append(_field(b"l", loss_class.encode()))
    return sha256(b"".join((_field(b"N", SCHEME.encode()), _count(len(groups)), *fields))).digest()


def page_keys(
    token_ids: TokenIds,
    *,
    page_size: int,
    namespace: bytes,
    group: int = 0,
    shard: int = 0,
    salt: bytes = b"",
    extra: Iterable[Extra] = (),
) -> list[PageKey]:
    """Return the keys of the full pages of ``token_ids``, in order. A partial last page has no key.

    Equal arguments give equal keys on every machine. Thread-safe.

    Args:
        token_ids: Token ids: a sequence of integers, or a 1-D integer array or tensor in host memory.
        page_size: Tokens per page.
        namespace: A namespace, as returned by ``namespace``.
        group: Number of the KV group, 0 to 65535.
        shard: Number of the shard, 0 to 65535.
        salt: Separates tenants: different salts give different keys.
        extra: Further values that K and V depend on. A str, bytes or int applies to the whole sequence, and
            the order of these items matters. A pair ``(token_offset, bytes)`` applies from the page that
            contains the offset, so earlier pages have the same keys as without the pair. The order of pairs
            does not matter, and several may have the same offset. A pair whose page is not full yet has no
            effect.

    Raises:
        TypeError: A token is not an integer (floats and bools are rejected), or an item of ``extra`` has the
            wrong type.
        ValueError: A token does not fit in int64, an array is not 1-D, or another argument is out of range.
    """
    tokens = _token_bytes(token_ids)
    page_size = _whole("page_size", page_size, range(1, 1 << 32))
    stride = 8 * page_size
    suffix = _whole("group", group, range(1 << 16)).to_bytes(2, "big")
    suffix += _whole("shard", shard, range(1 << 16)).to_bytes(2, "big")
    shared, placed = _split(extra, page_size)
    fields = (
        _field(b"R", SCHEME.encode()),
        _field(b"n", _octets("namespace", namespace)),
        _field(b"s", _octets("salt", salt)),
    )
    parent = sha256(b"".join((*fields, _count(len(shared)), *shared))).digest()
    head, plain = b"P" + _count(page_size), _count(0)
    keys = []
    for page in range(len(tokens) // stride):
        tail = _page_extras(placed[page]) if page in placed else plain
        parent = sha256(b"".join((head, parent, tokens[page * stride : (page + 1) * stride], tail))).digest()
        keys.append(PageKey(parent + suffix))
    return keys


def _field(tag: bytes, value: bytes) -> bytes:
    return tag + _count(len(value)) + value


def _count(number: int) -> bytes:
    return number.to_bytes(8, "little")


def _page_extras(items: list[tuple[int, bytes]]) -> bytes:
    fields = [_count(offset) + _field(b"x", value) for offset, value in sorted(items)]
    return b"".join((_count(len(fields)), *fields))


def _split(extra: Iterable[Extra], page_size: int) -> tuple[list[bytes], dict[int, list[tuple[int, bytes]]]]:
    """Return the encoded items that apply to the whole sequence, and the items with an offset, by page."""
    if isinstance(extra, str | bytes | bytearray | memoryview):
        raise TypeError(f"extra must be a sequence of items, got {extra!r}; write extra=({extra!r},)")
    shared: list[bytes] = []
    placed: dict[int, list[tuple[int, bytes]]] = defaultdict(list)
    for index, item in enumerate(extra):
        if isinstance(item, tuple):
            offset, value = _placed(f"extra[{index}]", item)
            placed[offset // page_size].append((offset, value))
        else:
            shared.append(_shared(f"extra[{index}]", item))
    return shared, placed


def _shared(name: str, item: object) -> bytes:
    match item:
        case bool():
            raise TypeError(f"{name} must be str, bytes, int or (token_offset, bytes), got {item!r}")
        case str():
            return _field(b"t", item.encode("utf-8", "surrogatepass"))
        case int():
            return _field(b"i", item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True))
        case bytes() | bytearray() | memoryview():
            return _field(b"b", bytes(item))
    raise TypeError(f"{name} must be str, bytes, int or (token_offset, bytes), got {item!r}")


def _placed(name: str, item: tuple[object, ...]) -> tuple[int, bytes]:
    if len(item) != 2:
        raise ValueError(f"{name} must be a pair (token_offset, bytes), got {item!r}")
    return _whole(f"{name}[0]", item[0], range(1 << 63)), _octets(f"{name}[1]", item[1])


def _octets(name: str, value: object) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"{name} must be bytes, got {value!r}")
    return bytes(value)


def _whole(name: str, value: object, allowed: range) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(
            f"{name} must be an integer from {allowed.start} to {allowed.stop - 1}, got {value!r}"
        )
    if int(value) not in allowed:
        raise ValueError(f"{name} must be from {allowed.start} to {allowed.stop - 1}, got {value}")
    return int(value)


def _token_bytes(token_ids: TokenIds) -> bytes:
    """Return the tokens as consecutive little-endian int64 values."""
    if isinstance(token_ids, str | bytes | bytearray):
        raise TypeError(
            f"token_ids must be a sequence of integers, or a 1-D array or tensor, got {type(token_ids).__name__}"
        )
    if isinstance(token_ids, Sequence):
        return _little_endian(np.frombuffer(_int64s(token_ids), np.int64))
    try:
        tokens = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"token_ids cannot be read as an integer array in host memory: {error}") from error
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"token_ids must have an integer dtype, got {tokens.dtype}")
    if tokens.ndim != 1:
        raise ValueError(f"token_ids must have one dimension, got shape {tokens.shape}")
    if tokens.dtype == np.uint64 and tokens.size and int(tokens.max()) not in _INT64:
        raise ValueError(f"token_ids[{int(tokens.argmax())}] must fit in int64, got {int(tokens.max())}")
    return _little_endian(tokens)


def _little_endian(tokens: NDArray[Any]) -> bytes:
    return tokens.astype("<i8", copy=False).tobytes()


def _int64s(token_ids: Sequence[int]) -> array[int]:
    strange = {
        kind for kind in set(map(type, token_ids)) if not issubclass(kind, int | np.integer) or kind is bool
    }
    if strange:
        index, item = next((i, item) for i, item in enumerate(token_ids) if type(item) in strange)
        raise TypeError(f"token_ids[{index}] must be an integer, got {item!r} ({type(item).__name__})")
    try:
        return array("q", token_ids)
    except OverflowError as error:
        index, item = next((i, item) for i, item in enumerate(token_ids) if int(item) not in _INT64)
        raise ValueError(f"token_ids[{index}] must fit in int64, got {item}") from error


def require_key_list(keys: Sequence[PageKey]) -> None:
    """Raise TypeError unless ``keys`` is a sequence of keys. Any other value would look like a cache miss."""
    _require_list(keys)
    if any(not issubclass(kind, bytes) for kind in set(map(type, keys))):
        strange = next(key for key in keys if not isinstance(key, bytes))
        raise TypeError(f"keys must contain only page keys (see TierStore.keys), got {strange!r:.60}")


def _require_list(keys: Sequence[PageKey]) -> None:
    if isinstance(keys, bytes | str) or any(not isinstance(key, bytes) for key in keys[:1]):
        raise TypeError(f"keys must be a sequence of page keys (see TierStore.keys), got {keys!r:.60}")


def require_keys_and_slots(
    keys: Sequence[PageKey], slots: Sequence[int], parents: Sequence[PageKey | None]
) -> None:
    """Check the arguments of ``put``.

    A malformed parent must be rejected here. Later it would prevent a whole batch from being written to disk.

    Raises:
        TypeError: ``keys`` is not a sequence of keys.
        ValueError: The numbers of keys and slots differ, or a key or a parent is malformed.
    """
    _require_list(keys)
    if len(keys) != len(slots):
        raise ValueError(f"put needs one slot per key, got {len(keys)} keys and {len(slots)} slots")
    strange = next((k for k in keys if not _is_key(k)), None)
    if strange is not None:
        raise ValueError(f"a page key must be {KEY_NBYTES} bytes (see TierStore.keys), got {strange!r:.60}")
    strange = next((p for p in parents if p is not None and not _is_key(p)), None)
    if strange is not None:
        raise ValueError(
            f"a parent must be a page key of {KEY_NBYTES} bytes (see TierStore.keys) or None, got {strange!r:.60}"
        )


def _is_key(key: object) -> bool:
    return isinstance(key, bytes) and len(key) == KEY_NBYTES
