"""gpt-oss: the recipe of its experts. Its blocks are the shared ones (GQA with sinks, alternating
windows, biases; experts with a clamped gate), as facts of its `Arch`.

Released form (huggingface.co/openai/gpt-oss-20b, unpacked to bf16): experts lie in one tensor with
inputs before outputs, and the gate and up columns alternate.
"""

from anabranch.core.arch import Arch
from anabranch.layout.choice import Place
from anabranch.models.recipes import decoder, router
from anabranch.weights.recipe import Param, Recipe, Source


def moe(arch: Arch, place: Place, local: str, name: str) -> list[Param]:
    """The down bias is held by the first of the ranks that cut an expert's width, so that the sum
    over them has it once."""
    spec = arch.moe
    assert spec is not None
    every, d, w = spec.experts, arch.hidden, spec.width
    held, (start, stop) = place.experts(every), place.expert_width(w)
    count, kept, pairs = held[1] - held[0], stop - start, (2 * start, 2 * stop)
    name, gate_up, down = f"{name}.experts", f"{local}.gate_up", f"{local}.down"
    up = Source(f"{name}.gate_up_proj", (every, d, 2 * w), (held, (0, d), pairs))
    up_bias = Source(f"{name}.gate_up_proj_bias", (every, 2 * w), (held, pairs))
    params = [
        Param(gate_up, (count, 2 * kept, d), (up,), transforms=("unzip", "transpose")),
        Param(f"{gate_up}_bias", (count, 2 * kept), (up_bias,), transforms=("unzip",)),
        Param(
            down,
            (count, d, kept),
            (Source(f"{name}.down_proj", (every, w, d), (held, (start, stop))),),
            transforms=("transpose",),
        ),
    ]
    if start == 0:
        bias = Source(f"{name}.down_proj_bias", (every, d), (held,))
        params.append(Param(f"{down}_bias", (count, d), (bias,)))
    return router(arch, local, f"{name.removesuffix('experts')}router") + params


def recipe(arch: Arch, place: Place) -> Recipe:
    return decoder(arch, place, moe)
