"""Prepared data of runs: the day that a template writes is the first one, and what is kept has a limit."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.config import Config
from megatrain.data.flagged_tokens import IDS
from megatrain.data.tokenizer import add_tokens
from megatrain.errors import ConfigError, DataError
from megatrain.model.weights.skeleton import read_config
from megatrain.train import inputs
from megatrain.train.inputs import Packer, choose_tokenizer
from megatrain.train.loop import train
from tests.train.project import make_config

FIRST, SECOND = datetime.date(2026, 2, 28), datetime.date(2026, 3, 1)
TEMPLATE = (
    "{{ strftime_now('%Y-%m-%d') }} {% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def make(root: Path, *, steps: int = 2, **data: Any) -> Config:
    (root / "day.jinja").write_text(TEMPLATE)
    said = [("one " * (n % 3), "step " * (n % 4 + 1)) for n in range(60)]
    rows = [[{"role": "user", "content": a}, {"role": "assistant", "content": b}] for a, b in said]
    (root / "chats.jsonl").write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))
    data |= {"path": str(root / "chats.jsonl"), "chat_template": str(root / "day.jinja"), "seq_len": 64}
    return make_config(root, data=data, train={"steps": steps}, optim={"warmup_steps": 0})


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let it be another day."""

    def set_to(day: datetime.date) -> None:
        class Day(datetime.date):
            @classmethod
            def today(cls) -> datetime.date:  # type: ignore[override]
                return day

        monkeypatch.setattr(inputs, "date", Day)

    return set_to


def test_a_run_goes_on_on_another_day(tmp_path: Path, clock: Any) -> None:
    """Nothing is kept between the two but the checkpoint."""
    clock(FIRST)
    train(make(tmp_path))
    clock(SECOND)
    train(make(tmp_path, steps=4), resume="auto")
    rows = (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2, 3, 4]
    with pytest.raises(DataError, match="not that of the run being resumed"):
        train(make(tmp_path, steps=6, day=str(SECOND)), resume="auto")


def test_what_is_kept_has_the_day_on_which_it_was_prepared(tmp_path: Path, clock: Any) -> None:
    def text(day: str | None = None, setting: str | None = None) -> str:
        config = make(tmp_path, day=setting)
        model = read_config(config.model.path)
        tokenizer = choose_tokenizer(config, None, model)
        prepared = Packer(config, tokenizer, model, tmp_path / "kept", day).train()
        said = f"the chat template writes the day, here and when a run is resumed {prepared.day}"
        assert prepared.notes()[-2] == said
        return str(tokenizer.decode(prepared.rows[[0]][0] & IDS))[:10]

    clock(FIRST)
    assert text() == "2026-02-28"
    clock(SECOND)
    assert text() == "2026-02-28"
    assert text(day="2026-03-01") == "2026-03-01"  # of a run that began where nothing was kept
    assert text() == "2026-02-28"
    assert text(day="2026-03-01", setting="2026-03-05") == "2026-03-05"
    assert len(list((tmp_path / "kept").glob("*-best_fit/"))) == 3


def test_what_is_kept_has_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was used within the hour stays: a run takes several sets, one after the other."""
    caplog.set_level("INFO")

    def kept(day: str, limit: int | None) -> list[str]:
        config = make(tmp_path, day=day, cache_limit=limit)
        model = read_config(config.model.path)
        Packer(config, choose_tokenizer(config, None, model), model, tmp_path / "kept").train()
        return sorted(path.name[33:-9] for path in (tmp_path / "kept").glob("*-best_fit/"))

    days = ["2026-02-01", "2026-02-02", "2026-02-03"]
    assert [len(kept(day, limit)) for day, limit in zip(days, (1, None, 1), strict=True)] == [1, 2, 3]
    monkeypatch.setattr(inputs, "_IN_USE_S", 0.0)
    assert kept(days[0], 1) == days  # nothing is made, and nothing removed
    assert kept("2026-02-04", 10**9) == [*days, "2026-02-04"]
    assert "removed" not in caplog.text
    kept("2026-02-05", 1)
    assert "removed 5 sets of prepared data (" in caplog.text
    assert "), beyond data.cache_limit what was not used for longest" in caplog.text


OTHER_END = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}"
NOT_TRAINED_ON = (
    "generation stops at <|endoftext|>{}; no example trains on that, so the model does not learn to stop: "
    "let answers end with it (data.chat_template), or name what they end with, such as <|end|>, as "
    "eos_token in tokenizer_config.json and as eos_token_id in generation_config.json"
)
IS_PADDING = (
    "{} ends what is trained on, and is the padding token too: here it is trained on where it ends an "
    "answer, and other trainers leave it out with the padding, so that a model does not learn to stop; "
    "name another pad_token in tokenizer_config.json"
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("template", "padding", "stop", "said"),
    [
        (TEMPLATE, None, None, None),
        (TEMPLATE, "<|end|>", None, None),
        (TEMPLATE, "<|endoftext|>", None, IS_PADDING.format("<|endoftext|>")),
        (OTHER_END, None, None, NOT_TRAINED_ON.format("")),
        (
            OTHER_END,
            "<|endoftext|>",
            None,
            NOT_TRAINED_ON.format(", the padding token too, which labels may leave out"),
        ),
        (OTHER_END, None, "<|end|>", None),
        (OTHER_END, "<|end|>", "<|end|>", IS_PADDING.format("<|end|>")),
    ],
)
def test_data_that_do_not_teach_a_model_to_stop_are_warned_of(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    template: str,
    padding: str | None,
    stop: str | None,
    said: str | None,
) -> None:
    """Also where the data are there already."""
    config = make(tmp_path, day=str(FIRST))
    (tmp_path / "day.jinja").write_text(template)
    model = read_config(config.model.path)
    tokenizer = choose_tokenizer(config, None, model)
    add_tokens(tokenizer, ["<|end|>"])
    tokenizer.pad_token = padding
    if stop is not None:
        settings = {"eos_token_id": [0, tokenizer.convert_tokens_to_ids(stop)]}
        (tmp_path / "model/generation_config.json").write_text(json.dumps(settings))
    model.vocab_size = len(tokenizer)
    for _ in range(2):
        caplog.clear()
        Packer(config, tokenizer, model, tmp_path / "kept").train()
        assert [record.message for record in caplog.records] == [said] * (said is not None)


def test_a_day_that_there_is_not_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.day is '2026-02-30' \(text\); it must be a day such as"):
        make(tmp_path, day="2026-02-30")
