"""Every class that transformers has for causal language models, or for images and text: exact, or refused.

Exact: loaded from its files, trained for three steps to the bits of a resident model, exported, and opened
again with every tensor equal. Refused: with one sentence, when it is read, counted, loaded or trained.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from transformers import PretrainedConfig

import megatrain
from megatrain.errors import ModelError
from megatrain.model.profile.count import count_anatomy
from megatrain.model.weights.skeleton import read_config
from tests.kinds import class_of, kinds, tiny_config
from tests.model.test_causal import COMPLETED
from tests.model.test_causal import REFUSED as ENCODERS
from tests.stream.whole_model import export_and_reopen, load_directory, train_beside, write_directory

NOT_BUILT = {
    "apertus1p5": "its tower for sound has sizes of its own",
    "blt": "its parts have sizes of their own",
    "deepseek_ocr2": "transformers does not build its tower of the defaults",
    "dots3_note": "its tower has sizes of its own",
    "evolla": "transformers has a name for it and no class",
    "fast_vlm": "its tower needs timm",
    "gemma3n": "its tower needs timm",
    "gemma4_assistant": "transformers does not make its configuration of the defaults",
    "granite4_vision": "transformers does not build its tower of the defaults",
    "hunyuan_vl": "transformers does not build its positions of the defaults",
    "inkling_mm_model": "it needs scipy",
    "musicgen": "transformers does not build it of the defaults",
    "musicgen_melody": "transformers does not build it of the defaults",
    "perception_lm": "its tower needs timm",
    "zamba": "transformers does not tie its layers at this size",
}
"""Types of which no tiny model is made, each with its reason; 20 at most."""

_PARTS = "has parts beside its causal language model"
_ALONE = "takes no rows of text alone, which are what is trained here"
_RUNS = "does not run on rows of text alone, which are what is trained here"
_BEHIND = "is an encoder: what it says of a token depends on the tokens behind it"
_LAYERS = "has no list of decoder layers to stream"
_OTHER = "which is not a causal language model"

REFUSED = {
    **dict.fromkeys(ENCODERS, _BEHIND),
    **dict.fromkeys(("ctrl", "openai-gpt"), _LAYERS),
    **dict.fromkeys(("blip", "blip-2", "instructblip", "instructblipvideo", "pi0"), _ALONE),
    **dict.fromkeys(("florence2", "pix2struct", "pp_formulanet", "t5gemma2", "udop"), _PARTS),
    "vision-encoder-decoder": _PARTS,
    **dict.fromkeys(("git", "gemma4_unified_assistant", "kosmos-2", "llama4", "molmo2"), _RUNS),
    **dict.fromkeys(("diffusion_gemma", "idefics"), _OTHER),
    "paligemma": _BEHIND,
    "reformer": f"{_LAYERS}|{_BEHIND}",  # its hashes are drawn, so a token may change what comes before it
    "shieldgemma2": "lacks 80 of the model's tensors",
    "xlstm": "does not compute the same twice",
}
"""Types that are refused, with a pattern of the sentence."""


SETTINGS: dict[str, dict[str, Any]] = {
    **{name: {"num_micro_batches": 1} for name in ("dory", "hrm_text")},  # layers run more than once
    "recurrent_gemma": {"activations": "keep"},  # layers keep state between calls
}
"""Settings that a type asks for in its refusal of all others."""


def refusal_of(name: str, place: Path) -> str:
    """Return the sentence with which a model is refused: when it is read, counted, loaded or trained."""
    config: PretrainedConfig = tiny_config(name)
    config.architectures = [class_of(type(config)).__name__]
    config.save_pretrained(place)
    try:
        count_anatomy(read_config(place), micro_batch_size=1, seq_len=16, precision="fp32")
        megatrain.load(config=config)
        train_written(name, place / "model")
    except ModelError as error:
        return str(error)
    pytest.fail(f"{name} is refused nowhere")


def train_written(name: str, place: Path) -> None:
    directory = write_directory(name, place)
    engine, reference = train_beside(load_directory(directory), directory.resident, **SETTINGS.get(name, {}))
    export_and_reopen(engine, reference, directory, place.with_name("out"))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")  # of transformers, on its own defaults
@pytest.mark.parametrize("name", sorted(kinds().keys() - NOT_BUILT.keys()))
def test_every_class_is_exact_or_refused(name: str, tmp_path: Path) -> None:
    if name not in REFUSED:
        train_written(name, tmp_path / "model")
        return
    sentence = refusal_of(name, tmp_path / "refused")
    assert re.search(REFUSED[name], sentence)
    assert "\n" not in sentence


def test_what_is_not_built_is_little_and_all_else_is_of_a_class() -> None:
    assert len(NOT_BUILT) <= 20
    assert not NOT_BUILT.keys() & REFUSED.keys()
    assert {*NOT_BUILT, *REFUSED} <= kinds().keys()
    assert COMPLETED.keys() <= kinds().keys()
