"""Frozen dataclasses <-> msgpack, driven by type hints and strict in both directions.

A dataclass travels as the array of its fields, an array as its bytes (the hint fixes its type, one
dimension, little-endian), a union of dataclasses as [name, fields]. Whatever does not fit its hint
is a WireError: unknown names, wrong types, missing or extra fields. Nothing is ever executed.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cache
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np

assert sys.byteorder == "little", "arrays travel in the byte order of x86-64 and aarch64"
MAX_FRAME = 2**31 - 1  # bytes of one message


class WireError(ValueError):
    """Bytes that are no message of the schema, or a value that its type hint does not allow."""


@dataclass(frozen=True, slots=True)
class Form:
    """How values of one type hint travel. pack None: msgpack takes them as they are."""

    pack: Callable[[object], object] | None
    unpack: Callable[[object], object]


class Schema:
    """The messages of one channel: a closed set of dataclasses."""

    def __init__(self, *types: type) -> None:
        self._forms = {t.__name__: form_of(t) for t in types}
        assert len(self._forms) == len(types), "two messages have one name"

    def encode(self, message: object) -> bytes:
        name = type(message).__name__
        form = self._forms.get(name)
        if form is None or form.pack is None:
            raise WireError(f"{name} is no message of this channel")
        data: bytes = msgpack.packb((name, form.pack(message)), use_bin_type=True)
        return data

    def decode(self, data: bytes) -> object:
        try:
            found = msgpack.unpackb(data, raw=False, use_list=False, strict_map_key=False)
        except (ValueError, TypeError, msgpack.UnpackException) as error:  # TypeError: map keys
            raise WireError(f"{len(data)} bytes are no msgpack: {error}") from None
        name, value = _pair(found)
        if name not in self._forms:
            raise WireError(f"{name!r} is no message of this channel")
        return self._forms[name].unpack(value)


def _pair(value: object) -> tuple[str, object]:
    if not isinstance(value, tuple) or len(value) != 2 or not isinstance(value[0], str):
        raise WireError(f"wanted [name, fields], found {_brief(value)}")
    return value[0], value[1]


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


@cache
def form_of(hint: object) -> Form:
    """The form of a type hint; TypeError for hints that cannot travel."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _scalar(_SCALARS[hint])
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return Form(None, lambda value: _checked(hint, value))
    if origin is Literal:
        return _literal(args)
    if origin in (Union, UnionType):
        return _union(args)
    if origin is tuple:
        return _tuple(args)
    if origin in (dict, Mapping):
        return _dict(form_of(args[0]), form_of(args[1]))
    if origin is np.ndarray:
        return _array(np.dtype(get_args(args[1])[0]))
    if isinstance(hint, type) and is_dataclass(hint):
        return _dataclass(hint)
    raise TypeError(f"{hint} cannot travel: no codec for it")


_SCALARS: dict[object, tuple[type, ...]] = {
    bool: (bool,),
    int: (int,),
    float: (float, int),
    str: (str,),
    bytes: (bytes,),
    NoneType: (NoneType,),
}


def _scalar(types: tuple[type, ...]) -> Form:
    first = types[0]
    allowed = frozenset(types)  # exact: a bool is no int

    def unpack(value: object) -> object:
        if type(value) not in allowed:
            raise WireError(f"wanted {first.__name__}, found {_brief(value)}")
        return float(value) if first is float else value  # type: ignore[arg-type]

    return Form(None, unpack)


def _checked(enum: type[StrEnum], value: object) -> object:
    if value not in list(enum):
        raise WireError(f"wanted one of {list(enum)}, found {_brief(value)}")
    return enum(str(value))


def _literal(values: tuple[object, ...]) -> Form:
    def unpack(value: object) -> object:
        if value not in values:
            raise WireError(f"wanted one of {values}, found {_brief(value)}")
        return value

    return Form(None, unpack)


def _union(args: tuple[object, ...]) -> Form:
    """Optional of one type, or of several dataclasses that travel with their names."""
    others = [a for a in args if a is not NoneType]
    optional = len(others) < len(args)
    inner = form_of(others[0]) if len(others) == 1 else _named(others)
    if not optional:
        return inner
    packs, unpacks = inner.pack, inner.unpack

    def unpack(value: object) -> object:
        return None if value is None else unpacks(value)

    if packs is None:
        return Form(None, unpack)
    return Form(lambda value: None if value is None else packs(value), unpack)


def _named(options: list[object]) -> Form:
    classes = {c.__name__: form_of(c) for c in options if isinstance(c, type) and is_dataclass(c)}
    if len(classes) == len(options):

        def pack(value: object) -> object:
            name = type(value).__name__
            form = classes.get(name)
            if form is None or form.pack is None:
                raise WireError(f"{name} is none of {sorted(classes)}")
            return name, form.pack(value)

        def unpack(value: object) -> object:
            name, content = _pair(value)
            if name not in classes:
                raise WireError(f"{name!r} is none of {sorted(classes)}")
            return classes[name].unpack(content)

        return Form(pack, unpack)
    types = tuple(t for option in options for t in _SCALARS[option])
    return Form(None, lambda value: _one_of(value, types))


def _one_of(value: object, types: tuple[type, ...]) -> object:
    if type(value) not in types:
        raise WireError(f"wanted one of {[t.__name__ for t in types]}, found {_brief(value)}")
    return value


def _tuple(args: tuple[object, ...]) -> Form:
    if len(args) == 2 and args[1] is ...:
        return _sequence(form_of(args[0]))
    forms = [form_of(a) for a in args]
    packs = [form.pack or (lambda v: v) for form in forms]
    plain = all(form.pack is None for form in forms)

    def pack(value: object) -> object:
        return [p(v) for p, v in zip(packs, _items(value), strict=True)]

    def unpack(value: object) -> object:
        items = _items(value)
        if len(items) != len(forms):
            raise WireError(f"wanted {len(forms)} items, found {_brief(value)}")
        return tuple([form.unpack(v) for form, v in zip(forms, items, strict=True)])

    return Form(None if plain else pack, unpack)


def _sequence(item: Form) -> Form:
    packs, unpacks = item.pack, item.unpack

    def unpack(value: object) -> object:
        return tuple([unpacks(v) for v in _items(value)])

    if packs is None:
        return Form(None, unpack)
    return Form(lambda value: [packs(v) for v in _items(value)], unpack)


def _items(value: object) -> tuple[object, ...]:
    if not isinstance(value, tuple):
        raise WireError(f"wanted a tuple, found {_brief(value)}")
    return value


def _dict(key: Form, item: Form) -> Form:
    packs = item.pack

    def pack(value: object) -> object:
        assert packs is not None
        return {k: packs(v) for k, v in _mapping(value).items()}

    def unpack(value: object) -> object:
        return {key.unpack(k): item.unpack(v) for k, v in _mapping(value).items()}

    return Form(None if packs is None else pack, unpack)


def _mapping(value: object) -> dict[object, object]:
    if not isinstance(value, dict):
        raise WireError(f"wanted a map, found {_brief(value)}")
    return value


def _array(dtype: "np.dtype[np.generic]") -> Form:
    def pack(value: object) -> object:
        if not isinstance(value, np.ndarray) or value.dtype != dtype or value.ndim != 1:
            raise WireError(f"wanted a one-dimensional {dtype} array, found {_brief(value)}")
        return value.tobytes()

    def unpack(value: object) -> object:
        if not isinstance(value, bytes) or len(value) % dtype.itemsize:
            raise WireError(f"wanted bytes of {dtype} elements, found {_brief(value)}")
        return np.frombuffer(value, dtype).copy()  # a copy, so that it can be written to

    return Form(pack, unpack)


def _dataclass(cls: type) -> Form:
    assert is_dataclass(cls)
    hints = get_type_hints(cls)
    names = [f.name for f in fields(cls) if f.init]
    forms = [form_of(hints[name]) for name in names]
    packing = [(name, form.pack) for name, form in zip(names, forms, strict=True)]
    unpacking = list(zip(names, [form.unpack for form in forms], strict=True))

    def pack(value: object) -> object:
        if type(value) is not cls:
            raise WireError(f"wanted {cls.__name__}, found {_brief(value)}")
        out = []
        for name, packs in packing:
            item = getattr(value, name)
            out.append(item if packs is None else packs(item))
        return out

    def unpack(value: object) -> object:
        items = _items(value)
        if len(items) != len(unpacking):
            raise WireError(f"{cls.__name__} has {len(unpacking)} fields, found {len(items)}")
        made = []
        for (name, unpacks), item in zip(unpacking, items, strict=True):
            try:
                made.append(unpacks(item))
            except WireError as error:
                raise WireError(f"{cls.__name__}.{name}: {error}") from None
        try:
            return cls(*made)
        except ValueError as error:
            raise WireError(f"{cls.__name__}: {error}") from None

    return Form(pack, unpack)
