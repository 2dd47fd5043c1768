"""What configuration and data know of objectives is what each says of itself."""

from __future__ import annotations

from megatrain.config.sections.preference import PreferenceConfig
from megatrain.objective.registry import DEFAULT, OBJECTIVES, names_for
from megatrain.objective.rows import MARKED, PAIRS, TEXTS


def test_settings_are_those_of_the_objectives() -> None:
    """Each is read by an objective, and each objective's are there, with their defaults and words."""
    ours = PreferenceConfig.model_fields
    theirs = {name: field for one in OBJECTIVES.values() for name, field in one.settings.model_fields.items()}
    assert ours.keys() == theirs.keys()
    for name, field in ours.items():
        assert (field.default, field.description) == (theirs[name].default, theirs[name].description)
        assert field.description


def test_rows_name_their_objectives() -> None:
    assert names_for(TEXTS) == DEFAULT.name
    assert "dpo" in names_for(PAIRS).split(" or ")
    assert names_for(MARKED) == "kto"
    for one in OBJECTIVES.values():
        assert one.rows.is_judged == (one.rows.sequences > 1) == (one is not DEFAULT)
        for theirs in (*one.llamafactory, *one.axolotl):
            assert {*theirs.keys.values(), *theirs.sets} - {""} <= one.settings.model_fields.keys()
