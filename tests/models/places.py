"""Recipes and places of every rank of a run, as assembly makes them."""

from anabranch.core.arch import Arch
from anabranch.core.resolve import RunConfig
from anabranch.layout.choice import Place
from anabranch.models.registry import family
from anabranch.weights.recipe import Recipe


def places(run: RunConfig, arch: Arch) -> list[Place]:
    own = run.layout.ownership(arch.heads, arch.kv_heads)
    return [Place(run.layout, own, rank) for rank in range(run.layout.mesh.world)]


def recipes(run: RunConfig, arch: Arch) -> list[Recipe]:
    return [family(arch).recipe(arch, place) for place in places(run, arch)]
