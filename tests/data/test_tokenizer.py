"""Tokenizers: the same text gives the same tokenizer, and no code from a model directory runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain.data.tokenizer import (
    END_OF_TEXT,
    check_vocabulary,
    end_of_document,
    has_tokenizer,
    load_tokenizer,
    train_tokenizer,
)
from megatrain.errors import ConfigError, DataError, ModelError

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
TEXTS = ["the cat sat on the mat. the cat sat.", "caf\u00e9 \U0001f600\n\tthe end"] * 5


def test_training_is_deterministic_and_lossless() -> None:
    first, second = (train_tokenizer(iter(TEXTS), 300) for _ in range(2))
    assert first.backend_tokenizer.to_str() == second.backend_tokenizer.to_str()
    # The texts have fewer pairs to merge than there is room for.
    assert 257 < len(first) <= 300
    assert (first.eos_token, first.eos_token_id, end_of_document(first)) == (END_OF_TEXT, 0, 0)
    for text in [*TEXTS, " x\r\n \u4e2d\u6587 <|>", "don 't ."]:
        assert first.decode(first(text)["input_ids"]) == text


def test_smallest_vocabulary_is_the_bytes() -> None:
    tokenizer = train_tokenizer(["ab"], 257)
    assert len(tokenizer) == 257
    assert len(tokenizer("caf\u00e9")["input_ids"]) == 5
    with pytest.raises(ConfigError, match=r"256 entries.*data\.vocab_size of 257 or more"):
        train_tokenizer(["ab"], 256)


def test_trained_tokenizer_loads_from_its_directory(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS, 280)
    trained.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    assert has_tokenizer(str(tmp_path))
    assert loaded(TEXTS)["input_ids"] == trained(TEXTS)["input_ids"]
    assert loaded.eos_token_id == 0


def test_directory_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert not has_tokenizer(str(tmp_path))
    with pytest.raises(ModelError, match=r"has no tokenizer .*tokenizer\.json.*set data\.tokenizer"):
        load_tokenizer(str(tmp_path))
    with pytest.raises(ModelError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_damaged_tokenizer_is_one_clear_sentence(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 280).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": ')
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config\.json is not readable as JSON"):
        load_tokenizer(str(tmp_path))


def without_special_tokens(settings: dict[str, Any]) -> None:
    """The tokens that a rule puts around each text have no entry: the Rust code panics."""
    rule = {"Sequence": {"id": "A", "type_id": 0}}
    word = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    settings["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [word, rule],
        "pair": [word, rule, rule],
        "special_tokens": {},
    }


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("tokenizer_config.json", lambda settings: settings.update(model_max_length={"a": 1})),
        ("tokenizer_config.json", lambda settings: settings.update(model_max_length="long")),
        ("tokenizer.json", without_special_tokens),
    ],
)
def test_a_tokenizer_that_fails_in_use_is_refused(
    file: str, change: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    train_tokenizer(TEXTS, 280).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / file).read_text())
    change(settings)
    (tmp_path / file).write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="the tokenizer cannot be loaded") as caught:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "vocab.txt"])
def test_a_link_to_somebody_s_secret_is_not_read(tmp_path: Path, name: str) -> None:
    """A checkpoint has a tokenizer's files, and is shared."""
    model, secret = tmp_path / "model", tmp_path / "id"
    train_tokenizer(TEXTS, 280).save_pretrained(model)
    secret.write_text("secret")
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(secret)
    with pytest.raises(ModelError, match=f"{name} is a link to a file outside the model directory"):
        load_tokenizer(str(model))


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["evil.Evil", None]}, ["evil.Evil", None]])
def test_code_of_a_model_directory_never_runs(tmp_path: Path, file: str, auto_map: object) -> None:
    train_tokenizer(TEXTS, 280).save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: ...\n")
    settings = json.loads((tmp_path / file).read_text()) if (tmp_path / file).exists() else {}
    (tmp_path / file).write_text(json.dumps(settings | {"auto_map": auto_map, "tokenizer_class": "Evil"}))
    with pytest.raises(
        ModelError, match=rf"{file} names a tokenizer class in its own code \(auto_map\)"
    ) as caught:
        load_tokenizer(str(tmp_path))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "ran").exists()


def test_model_code_alone_does_not_concern_the_tokenizer(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 280).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(
        '{"auto_map": {"AutoModelForCausalLM": "evil.Evil"}, "model_type": "llama"}'
    )
    assert len(load_tokenizer(str(tmp_path))) <= 280


def test_tokenizer_without_an_end_of_document_is_refused() -> None:
    tokenizer = train_tokenizer(TEXTS, 280)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match=r"no eos_token.*tokenizer_config\.json"):
        end_of_document(tokenizer)


def test_token_beyond_the_vocabulary_is_bad_data() -> None:
    check_vocabulary(511, 512)
    with pytest.raises(
        DataError, match=r"token id 512, .* vocab_size is 512: the tokenizer of 600 entries"
    ) as caught:
        check_vocabulary(512, 512, tokenizer_size=600)
    assert caught.value.exit_code == 4


def test_real_tokenizer_gives_the_published_ids() -> None:
    path = SHARED / "stories260K" / "hf"
    if not path.exists():
        pytest.skip("needs stories260K, a small trained model, in shared/data next to the repository")
    tokenizer = load_tokenizer(str(path))
    assert tokenizer("Once upon a time")["input_ids"] == [1, 403, 407, 261, 378]
    assert end_of_document(tokenizer) == 2
