"""Settings of the wrong type, or no choice of their flag: named wherever they are given."""

import pytest

from anabranch.core.config import ENGINE_FIELDS, EngineConfig
from anabranch.engine.llm import LLM

CHOICES = {
    f.name: f.metadata["choices"] for f in EngineConfig.__dataclass_fields__.values()
    if f.metadata["choices"]
}  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_a_value_that_is_no_choice_names_the_flag_and_the_choices(name: str) -> None:
    with pytest.raises(ValueError, match="choose one of") as caught:
        EngineConfig(**{name: "zz"})
    said = str(caught.value)
    assert said.startswith(f"--{name.replace('_', '-')} zz") and CHOICES[name][0] in said
    with pytest.raises(ValueError, match="choose one of"):
        LLM(**{name: "zz"})


@pytest.mark.parametrize(
    ("name", "value"),
    [("tp", "x"), ("tp", 4.5), ("tp", True), ("tp", None), ("dcp", "2"), ("seed", 1.0),
     ("prefix_cache", 1), ("prefix_cache", "no"), ("debug", None), ("kv_memory", 3),
     ("kv_to_q", 1), ("model", b"x")],
)  # fmt: skip
def test_a_value_of_another_type_names_the_flag(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} .*: wanted "):
        EngineConfig(**{name: value})  # type: ignore[arg-type]


def test_defaults_and_every_choice_are_taken() -> None:
    assert len(ENGINE_FIELDS) > 40
    for name, choices in CHOICES.items():
        for choice in choices:
            assert getattr(EngineConfig(**{name: choice}), name) == choice
