"""Families by name: how each one's parameters are read and its modules made.

A family with blocks of its own joins here, and nowhere else does code ask for a family's name.
Imports no torch: recipes are integers, and builders are loaded where modules are made.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, cast

from anabranch.core.arch import Arch
from anabranch.layout.choice import Place
from anabranch.models import deepseek_v4, gpt_oss
from anabranch.models.recipes import decoder
from anabranch.weights.recipe import Recipe

if TYPE_CHECKING:
    from anabranch.models.build import Builder


@dataclass(frozen=True)
class Family:
    """recipe: every parameter of a rank. builder: "module:class" that makes its modules of them."""

    recipe: Callable[[Arch, Place], Recipe]
    builder: str = "build:Builder"

    def load_builder(self) -> "type[Builder]":
        module, _, name = self.builder.partition(":")
        return cast("type[Builder]", getattr(import_module(f"anabranch.models.{module}"), name))


_SHARED = Family(decoder)
FAMILIES = {
    "llama": _SHARED,
    "mistral": _SHARED,
    "qwen2": _SHARED,
    "qwen3": _SHARED,
    "qwen3_moe": _SHARED,
    "deepseek_v2": _SHARED,
    "deepseek_v3": _SHARED,
    "gpt_oss": Family(gpt_oss.recipe),
    "deepseek_v4": Family(deepseek_v4.recipe, "build_v4:V4Builder"),
}


def family(arch: Arch) -> Family:
    """ValueError with the known families for an unknown one."""
    found = FAMILIES.get(arch.family)
    if found is None:
        raise ValueError(f"unknown family {arch.family!r}; known: {', '.join(sorted(FAMILIES))}")
    return found
