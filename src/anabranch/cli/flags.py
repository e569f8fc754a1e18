"""Flags made from dataclass fields, in one place for every command.

A command's function takes the dataclass; `flags(...)` gives it a signature in which each field is
an option: name with dashes, default, help and choices from the field. Owns no meaning.
"""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from functools import wraps
from typing import ClassVar, Protocol, TypeVar, get_type_hints

import typer

from anabranch.core.config import flag_name


class DataClass(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Field[object]]]


D = TypeVar("D", bound=DataClass)
R = TypeVar("R")


def flags(**groups: type[DataClass]) -> Callable[[Callable[..., R]], Callable[..., R]]:
    """Replace each parameter named in `groups` by the flags of its dataclass.

    A field called `model` becomes the positional MODEL. The function's other parameters stay as
    they are.
    """

    def decorate(function: Callable[..., R]) -> Callable[..., R]:
        signature = inspect.signature(function)
        own = [p for name, p in signature.parameters.items() if name not in groups]
        made = [p for kind in groups.values() for p in _parameters(kind)]

        @wraps(function)
        def command(**values: object) -> R:
            built = {name: collect(kind, values) for name, kind in groups.items()}
            rest = {p.name: values[p.name] for p in own}
            return function(**rest, **built)

        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *made)]
        # positional arguments are read in signature order: MODEL comes first
        keyword.sort(key=lambda p: p.name != "model")
        setattr(command, "__signature__", signature.replace(parameters=keyword))  # noqa: B010
        return command

    return decorate


def collect(kind: type[D], values: dict[str, object]) -> D:
    """The dataclass from flag values. ValueError is the dataclass's own."""
    return kind(**{f.name: values[f.name] for f in fields(kind)})


def _parameters(kind: type[DataClass]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind)
    return [_parameter(f, hints[f.name]) for f in fields(kind)]


def _parameter(f: Field[object], hint: object) -> inspect.Parameter:
    assert f.default is not MISSING, f"{f.name} needs a default to be a flag"
    text, name = str(f.metadata.get("help", "")), flag_name(f.name)
    choices = f.metadata.get("choices", ())
    default: object
    if f.name == "model":
        default = typer.Argument(None, help=text, show_default=False)
    elif hint is bool:
        words = f"{name}/--no-{name[2:]}" if f.default else name
        default = typer.Option(f.default, words, help=text)
    else:
        metavar = "{" + ",".join(choices) + "}" if choices else None
        shown = f.default not in (None, "")
        default = typer.Option(f.default, name, help=text, metavar=metavar, show_default=shown)
    return inspect.Parameter(
        f.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint
    )
