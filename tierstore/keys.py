"""Page keys: what a page is known by, in every tier, process and restart.

A key is the digest of everything its bytes depend on: the namespace (model, dtype, layout), the tenant's salt, the
extras (LoRA, images) and all tokens up to the end of the page. Each page hashes its parent's digest, so equal keys
mean equal prefixes and a longer sequence keeps the keys of a shorter one. Every field is tagged and carries its
length, so two different inputs never encode to the same bytes. No clock, no seed, no I/O.
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
    """What NumPy can read: an ndarray, a torch tensor in host memory."""

    def __array__(self) -> NDArray[Any]: ...


TokenIds: TypeAlias = Sequence[int] | Array
"""One sequence of token ids, each within int64. A tensor or array must be 1-D and of an integer dtype."""

Extra: TypeAlias = str | bytes | int | tuple[int, bytes]
"""What else the KV depends on: an item for the whole sequence, or ``(token_offset, bytes)`` from that token on."""

SCHEME = "tierstore-keys-1"
"""Changes whenever equal input would give another key: pages under keys of another scheme can never be found again."""

KEY_NBYTES = 36
"""Length of every ``PageKey``."""

_INT64 = range(-(1 << 63), 1 << 63)


EXACT = "exact"
"""The loss class of pages that hold what the model computed, bit by bit; it leaves the namespace as it is."""


def namespace(specs: PageSpec | Sequence[PageSpec], *, loss_class: str = EXACT) -> bytes:
    """The 32-byte namespace of the pages of one store: equal only for equal fingerprints in equal order.

    ``loss_class``: of the codec that copies of these pages go through, where they lose something; pages of two classes
    have no key in common. ValueError when there is no spec.
    """
    groups = (specs,) if isinstance(specs, PageSpec) else tuple(specs)
    if not groups:
        raise ValueError("namespace needs at least one PageSpec")
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
    """The keys of the full pages of ``token_ids``, in order; the tokens of a partial last page have no key.

    ``salt`` separates tenants. Items of ``extra`` that are str, bytes or int apply to the whole sequence and their
    order counts. A pair ``(token_offset, bytes)`` applies from the page that holds the offset, so earlier pages
    stay shared; the order of pairs does not count, several may share an offset, and one beyond the last full page
    changes nothing yet. Pure: equal arguments give equal keys on every machine.

    TypeError or ValueError, naming the item, for what is not an integer token (floats and bools included), an
    array that is not 1-D, a token beyond int64, or an extra of another form.
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
    """Encoded items of the whole sequence, and the placed ones by the page that holds their offset."""
    if isinstance(extra, str | bytes | bytearray | memoryview):
        raise TypeError(f"extra is {extra!r}; allowed: an iterable of items, so write extra=({extra!r},)")
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
            raise TypeError(f"{name} is {item!r}; allowed: str, bytes, int or (token_offset, bytes)")
        case str():
            return _field(b"t", item.encode("utf-8", "surrogatepass"))
        case int():
            return _field(b"i", item.to_bytes(item.bit_length() // 8 + 1, "little", signed=True))
        case bytes() | bytearray() | memoryview():
            return _field(b"b", bytes(item))
    raise TypeError(f"{name} is {item!r}; allowed: str, bytes, int or (token_offset, bytes)")


def _placed(name: str, item: tuple[object, ...]) -> tuple[int, bytes]:
    if len(item) != 2:
        raise ValueError(f"{name} is {item!r}; allowed: (token_offset, bytes)")
    return _whole(f"{name}[0]", item[0], range(1 << 63)), _octets(f"{name}[1]", item[1])


def _octets(name: str, value: object) -> bytes:
    if not isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"{name} is {value!r}; allowed: bytes")
    return bytes(value)


def _whole(name: str, value: object, allowed: range) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}; allowed: an integer of {allowed.start} to {allowed.stop - 1}")
    if int(value) not in allowed:
        raise ValueError(f"{name} is {value}; allowed: {allowed.start} to {allowed.stop - 1}")
    return int(value)


def _token_bytes(token_ids: TokenIds) -> bytes:
    """The tokens as int64, little endian, one after the other."""
    if isinstance(token_ids, str | bytes | bytearray):
        raise TypeError(
            f"token_ids is {type(token_ids).__name__}; allowed: a sequence of integers, a 1-D array or tensor"
        )
    if isinstance(token_ids, Sequence):
        return _little_endian(np.frombuffer(_int64s(token_ids), np.int64))
    try:
        tokens = np.asarray(token_ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(
            f"token_ids cannot be read as an array of integers in host memory: {error}"
        ) from error
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"token_ids has dtype {tokens.dtype}; allowed: an integer dtype")
    if tokens.ndim != 1:
        raise ValueError(f"token_ids has shape {tokens.shape}; allowed: one dimension")
    if tokens.dtype == np.uint64 and tokens.size and int(tokens.max()) not in _INT64:
        raise ValueError(
            f"token_ids[{int(tokens.argmax())}] is {int(tokens.max())}; allowed: what fits in int64"
        )
    return _little_endian(tokens)


def _little_endian(tokens: NDArray[Any]) -> bytes:
    return tokens.astype("<i8", copy=False).tobytes()


def _int64s(token_ids: Sequence[int]) -> array[int]:
    strange = {
        kind for kind in set(map(type, token_ids)) if not issubclass(kind, int | np.integer) or kind is bool
    }
    if strange:
        index, item = next((i, item) for i, item in enumerate(token_ids) if type(item) in strange)
        raise TypeError(f"token_ids[{index}] is {item!r}, a {type(item).__name__}; allowed: an integer")
    try:
        return array("q", token_ids)
    except OverflowError as error:
        index, item = next((i, item) for i, item in enumerate(token_ids) if int(item) not in _INT64)
        raise ValueError(f"token_ids[{index}] is {item}; allowed: what fits in int64") from error


def require_key_list(keys: Sequence[PageKey]) -> None:
    """TypeError for a single key, or for what holds anything else: it would look like a miss, or end a call halfway."""
    _require_list(keys)
    if any(not issubclass(kind, bytes) for kind in set(map(type, keys))):
        strange = next(key for key in keys if not isinstance(key, bytes))
        raise TypeError(f"keys has {strange!r:.60}; allowed: a sequence of page keys, as keys() gives")


def _require_list(keys: Sequence[PageKey]) -> None:
    if isinstance(keys, bytes | str) or any(not isinstance(key, bytes) for key in keys[:1]):
        raise TypeError(f"keys is {keys!r:.60}; allowed: a sequence of page keys, as keys() gives")


def require_keys_and_slots(
    keys: Sequence[PageKey], slots: Sequence[int], parents: Sequence[PageKey | None]
) -> None:
    """``parents``: written beside the pages, so that one that is none would keep its whole batch from the disk."""
    _require_list(keys)
    if len(keys) != len(slots):
        raise ValueError(f"{len(keys)} keys with {len(slots)} slots; allowed: one slot a key")
    strange = next((k for k in keys if not _is_key(k)), None)
    if strange is not None:
        raise ValueError(f"{strange!r} is no page key; allowed: the {KEY_NBYTES} bytes that keys() gives")
    strange = next((p for p in parents if p is not None and not _is_key(p)), None)
    if strange is not None:
        raise ValueError(
            f"parent {strange!r} is no page key; allowed: the {KEY_NBYTES} bytes that keys() gives, or None"
        )


def _is_key(key: object) -> bool:
    return isinstance(key, bytes) and len(key) == KEY_NBYTES
