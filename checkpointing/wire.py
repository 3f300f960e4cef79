"""Packs values as bytes for another process: JSON and raw bytes, nothing that could be code.

[Note: wire] `pack` returns one line of JSON, then the raw bytes in the value, in order. A type that
JSON lacks is an object with one key that begins with "$": {"$tuple": […]}, {"$bytes": length},
{"$path": "…"}, {"$dict": [[key, value], …]}, and {"$Name": [field, …]} for a registered dataclass.
Fields are encoded by their annotations, without naming their types. `unpack` checks every field
against its annotation, and creates only registered classes."""

import json
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Literal

MAX_BYTES = 256 << 20
"""Largest packed value in bytes: enough for the layouts of 16,384 ranks, or for the commit record
of a step of 400 TB."""
MAX_NESTING = 64

_NAMED: dict[str, type] = {}
"""Name → registered dataclass."""
_SHARED: set[type] = set()
"""Registered dataclasses of which equal values are packed only once."""


class WireError(Exception):
    """The bytes cannot be unpacked: they are too long, malformed, or of a type that this process
    has not registered."""


def register(*kinds: type, shared: bool = False) -> None:
    """Allow values of these dataclasses to be packed.

    Args:
        kinds: dataclasses whose fields have types that can be packed.
        shared: pack equal values only once; `unpack` returns one object for them. They must be
            hashable.
    """
    for kind in kinds:
        if _NAMED.setdefault(kind.__name__, kind) is not kind:
            raise ValueError(f"two dataclasses called {kind.__name__} are registered")
        if shared:
            _SHARED.add(kind)


def pack(value: Any) -> bytes:
    """Returns the bytes of a value, for `unpack`.

    Args:
        value: None, numbers, text, bytes, paths, registered dataclasses; and lists, tuples and
            mappings of these.

    Raises:
        TypeError: `value` contains something else.
    """
    out = _Packing([], {})
    text = json.dumps(_encode_any(value, out), separators=(",", ":"))
    return b"".join((text.encode(), b"\n", *out.blobs))


def unpack(data: bytes) -> Any:
    """Returns the value given to `pack`.

    Raises:
        WireError: the bytes are not from `pack`, or do not match the annotations.
    """
    if len(data) > MAX_BYTES:
        raise WireError(f"{len(data)} bytes, more than {MAX_BYTES}")
    text, _, blobs = data.partition(b"\n")
    found = _Unpacking(blobs, [])
    try:
        value = _decode_any(json.loads(text), found)
    except (ValueError, TypeError, RecursionError) as error:
        raise WireError(f"malformed: {error}"[:200]) from error
    _require(found.at == len(blobs), blobs, "the end")  # every byte must have been read
    return value


# --- how each type is packed ---------------------------------------------------------------------


@dataclass
class _Packing:
    blobs: list[bytes]
    numbers: dict[Any, int]
    """Number of each shared value that has been packed."""


@dataclass
class _Unpacking:
    blobs: bytes
    shared: list[Any]
    at: int = 0
    """Offset of the next raw bytes."""
    depth: int = 0


@dataclass(frozen=True)
class _Form:
    encode: Callable[[Any, _Packing], Any] | None
    """Value → JSON; None if the value is its own JSON."""
    decode: Callable[[Any, _Unpacking], Any]
    """JSON → value; raises WireError."""
    plain: frozenset[type] | None = None
    """JSON types of a value that is its own JSON and needs no further check; else None."""
    row: tuple[int, frozenset[type]] | None = None
    """For a tuple of values that are their own JSON: its length and their types; else None."""


def _require(right: bool, value: Any, expected: str) -> None:
    if not right:
        raise WireError(f"{ascii(value)[:40]} where {expected} is due")


@cache
def _form(hint: Any) -> _Form:
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return _Form(_encode_any, _decode_any)
    if hint is bytes:
        return _Form(_encode_bytes, _decode_bytes)
    if hint is float:
        return _plain(float, int)
    if hint in (bool, int, str, type(None)):
        return _plain(hint)
    if hint is Path:
        return _Form(lambda value, _: str(value), lambda value, _: Path(_text(value)))
    if origin is Literal:
        return _literal(inner)
    if origin in (typing.Union, types.UnionType):
        return _union(inner)
    if origin is tuple and inner[-1] is not Ellipsis:
        return _fixed([_form(one) for one in inner])
    if origin in (list, tuple, Sequence, Collection):
        return _many(_form(inner[0]), tuple if origin is tuple else list)
    if origin in (dict, Mapping):
        return _mapping(_form(inner[0]), _form(inner[1]))
    if is_dataclass(hint) and isinstance(hint, type):
        return _shared(hint) if hint in _SHARED else _fields(hint)
    if isinstance(hint, type):  # a protocol, whose values name their own classes
        return _Form(_encode_any, _decode_any)
    raise TypeError(f"{hint} cannot be packed")


def _plain(*kinds: type) -> _Form:
    expected = " or ".join(kind.__name__ for kind in kinds)

    def decode(value: Any, _: _Unpacking) -> Any:
        # not isinstance, by which True would pass for an integer
        _require(type(value) in kinds, value, expected)
        return value

    return _Form(None, decode, frozenset(kinds))


def _literal(values: tuple[Any, ...]) -> _Form:
    def decode(value: Any, _: _Unpacking) -> Any:
        _require(type(value) is str and value in values, value, " or ".join(map(str, values)))
        return value

    return _Form(None, decode)


def _union(hints: tuple[Any, ...]) -> _Form:
    """Returns the form of an optional type, of plain types, or of self-naming values."""
    others = [hint for hint in hints if hint is not type(None)]
    optional = len(others) < len(hints)
    forms = [_form(hint) for hint in others]
    if len(others) == 1:
        encode, decode = forms[0].encode, forms[0].decode
        return _Form(
            encode and (lambda value, out: None if value is None else encode(value, out)),
            lambda value, found: None if optional and value is None else decode(value, found),
        )
    if all(
        typing.get_origin(hint) is Literal or form.plain
        for hint, form in zip(others, forms, strict=True)
    ):
        kinds = {kind for form in forms for kind in form.plain or (str,)}
        return _plain(*kinds, *([type(None)] if optional else []))

    def decode_named(value: Any, found: _Unpacking) -> Any:
        decoded = _decode_any(value, found)
        _require(isinstance(decoded, hints), value, " or ".join(one.__name__ for one in hints))
        return decoded

    return _Form(_encode_any, decode_named)


def _many(form: _Form, make: Callable[[Any], Any]) -> _Form:
    one = form.encode
    expected = f"a list of {form.row or form.plain}"

    def decode(value: Any, found: _Unpacking) -> Any:
        _require(type(value) is list, value, "a list")
        # Lists may be long, so lists of plain values are checked without a call for each.
        if form.plain is not None:
            _require(form.plain.issuperset(map(type, value)), value, expected)
            return make(value)
        if form.row is not None:
            length, kinds = form.row
            right = {list}.issuperset(map(type, value)) and {length}.issuperset(map(len, value))
            right = right and kinds.issuperset(map(type, chain.from_iterable(value)))
            _require(right, value, expected)
            return make(map(tuple, value))
        return make([form.decode(item, found) for item in value])

    return _Form(one and (lambda value, out: [one(item, out) for item in value]), decode)


def _fixed(forms: list[_Form]) -> _Form:
    encodes = [form.encode or _itself for form in forms]
    as_it_is = all(form.encode is None for form in forms)
    first = forms[0].plain
    row = (len(forms), first) if first and all(form.plain == first for form in forms) else None

    def encode(value: Any, out: _Packing) -> Any:
        return [one(item, out) for one, item in zip(encodes, value, strict=True)]

    def decode(value: Any, found: _Unpacking) -> Any:
        _require(type(value) is list and len(value) == len(forms), value, f"{len(forms)} values")
        return tuple(form.decode(item, found) for form, item in zip(forms, value, strict=True))

    return _Form(None if as_it_is else encode, decode, row=row)


def _mapping(key: _Form, form: _Form) -> _Form:
    if key.plain != {str}:
        pairs = _many(_fixed([key, form]), dict)
        encode = pairs.encode
        return _Form(
            lambda value, out: encode([*value.items()], out) if encode else [*value.items()],
            pairs.decode,
        )
    one = form.encode

    def decode(value: Any, found: _Unpacking) -> Any:
        _require(type(value) is dict, value, "an object")
        decode_one = form.decode
        return {name: decode_one(item, found) for name, item in value.items()}

    return _Form(
        one and (lambda value, out: {name: one(item, out) for name, item in value.items()}), decode
    )


def _fields(kind: type) -> _Form:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in fields(kind)]
    forms = [_form(hints[name]) for name in names]
    steps = [(name, form.encode) for name, form in zip(names, forms, strict=True)]
    parts = [(name, form.plain or (), form.decode) for name, form in zip(names, forms, strict=True)]

    def encode(value: Any, out: _Packing) -> Any:
        return [
            getattr(value, name) if one is None else one(getattr(value, name), out)
            for name, one in steps
        ]

    def decode(value: Any, found: _Unpacking) -> Any:
        if type(value) is not list or len(value) != len(names):
            _require(False, value, f"the {len(names)} fields of {kind.__name__}")
        return kind(
            **{
                # most fields are plain, and a call for each would cost more than the check
                name: item if type(item) in plain else decode_one(item, found)
                for (name, plain, decode_one), item in zip(parts, value, strict=True)
            }
        )

    return _Form(encode, decode)


def _shared(kind: type) -> _Form:
    whole = _fields(kind)
    encode_whole = whole.encode
    assert encode_whole

    def encode(value: Any, out: _Packing) -> Any:
        number = out.numbers.get(value)
        if number is not None:
            return number
        out.numbers[value] = len(out.numbers)
        return encode_whole(value, out)

    def decode(value: Any, found: _Unpacking) -> Any:
        if type(value) is int:
            _require(0 <= value < len(found.shared), value, f"a {kind.__name__} seen before")
            decoded = found.shared[value]
            _require(isinstance(decoded, kind), value, kind.__name__)
            return decoded
        found.shared.append(whole.decode(value, found))
        return found.shared[-1]

    return _Form(encode, decode)


def _itself(value: Any, _: _Packing) -> Any:
    return value


def _text(value: Any) -> str:
    _require(type(value) is str, value, "text")
    return str(value)


def _encode_bytes(value: Any, out: _Packing) -> int:
    out.blobs.append(value)
    return len(value)


def _decode_bytes(value: Any, found: _Unpacking) -> bytes:
    left = len(found.blobs) - found.at
    _require(type(value) is int and 0 <= value <= left, value, f"a length of {left} at most")
    found.at += value
    return found.blobs[found.at - value : found.at]


# --- values that name their types ----------------------------------------------------------------

_JSON = frozenset({type(None), bool, int, float, str})


def _encode_any(value: Any, out: _Packing) -> Any:
    if type(value) in _JSON:
        return value
    kind: Any = type(value)
    name = kind.__name__
    if _NAMED.get(name) is kind:
        encode = _form(kind).encode
        assert encode
        return {f"${name}": encode(value, out)}
    if isinstance(value, tuple):
        return {"$tuple": [_encode_any(item, out) for item in value]}
    if isinstance(value, list):
        return [_encode_any(item, out) for item in value]
    if isinstance(value, bytes):
        return {"$bytes": _encode_bytes(value, out)}
    if isinstance(value, Mapping):
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode_any(item, out) for key, item in value.items()}
        return {"$dict": [[_encode_any(one, out) for one in item] for item in value.items()]}
    if isinstance(value, Path):
        return {"$path": str(value)}
    raise TypeError(f"a {type(value).__qualname__} cannot be packed")


def _decode_any(value: Any, found: _Unpacking) -> Any:
    if type(value) not in (list, dict):
        return value
    found.depth += 1
    _require(found.depth <= MAX_NESTING, "…", f"nesting of {MAX_NESTING} at most")
    decoded: Any
    match value:
        case list():
            decoded = [_decode_any(item, found) for item in value]
        case {"$tuple": list(items)}:
            decoded = tuple(_decode_any(item, found) for item in items)
        case {"$bytes": length}:
            decoded = _decode_bytes(length, found)
        case {"$dict": list(items)}:
            decoded = dict(_PAIR.decode(item, found) for item in items)
        case {"$path": text}:
            decoded = Path(_text(text))
        case _:
            key = next(iter(value), "")
            if key.startswith("$"):
                kind = _NAMED.get(key[1:])
                if kind is None:
                    raise WireError(f"{ascii(key)[:40]}: no class of this name is registered")
                decoded = _form(kind).decode(value[key], found)
            else:
                decoded = {key: _decode_any(item, found) for key, item in value.items()}
    found.depth -= 1
    return decoded


_PAIR = _fixed([_form(Any), _form(Any)])
