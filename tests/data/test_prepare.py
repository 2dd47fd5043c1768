"""Prepared data: the same rows from any number of processes, kept whole or not at all, all counted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from megatrain.config.sections.data import DataConfig
from megatrain.data.cache import RowFile, SomeRows, find_rows
from megatrain.data.fitting import NotTextError, Packing
from megatrain.data.flagged_tokens import split_words
from megatrain.data.loader import PackedLoader, fingerprint
from megatrain.data.prepare import Prepared, prepare_rows
from megatrain.data.read.examples import read_examples
from megatrain.data.tokenizer import train_tokenizer
from megatrain.data.tokens.encode import EncoderRecipe
from megatrain.data.tokens.template import TrainOn
from megatrain.errors import DataError
from megatrain.objective.registry import OBJECTIVES

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|endoftext|>{% endif %}{% endfor %}"
)


TEXT = "<user>a<assistant>bb<|endoftext|><user>c<assistant>dddd<|endoftext|>"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(["<user>hello <assistant>world and more\n"] * 9, 300)


def write_chats(folder: Path, count: int = 40) -> Path:
    file = folder / "chats.jsonl"
    rows = [
        [
            {"role": "user", "content": "hello " * (1 + n % 7)},
            {"role": "assistant", "content": "world " * (1 + n % 5)},
        ]
        for n in range(count)
    ]
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    return file


def prepare(tokenizer: Any, file: Path, folder: Path | None = None, **more: Any) -> Prepared:
    packing: dict[str, Any] = {"seq_len": 32, "way": "best_fit", "too_long": "auto", "fill_id": 0}
    packing |= {name: more.pop(name) for name in list(more) if name in packing}
    train_on = TrainOn(last_only=more.pop("last_only", False))
    data = more.pop("data", DataConfig(path=str(file)))  # type: ignore[arg-type]
    return prepare_rows(
        lambda: read_examples(data),
        EncoderRecipe(
            tokenizer=tokenizer,
            template=more.pop("template", TEMPLATE),
            train_on=train_on,
            end_id=tokenizer.eos_token_id,
            objective=OBJECTIVES[more.pop("loss", "sft")],
        ),
        Packing(**packing),
        folder=folder,
        key="key",
        **more,
    )


def all_rows(prepared: Prepared) -> Any:
    return prepared.rows[range(len(prepared.rows))]


def test_every_trained_token_of_every_example_is_in_a_row(tokenizer: Any, tmp_path: Path) -> None:
    prepared = prepare(tokenizer, write_chats(tmp_path))
    ids, labels, positions = split_words(all_rows(prepared))
    texts = [tokenizer.decode(part) for part in np.split(labels[labels >= 0], 1)]
    assert texts[0].count("world ") == sum(1 + n % 5 for n in range(40))
    assert texts[0].count("<|endoftext|>") == 40
    assert "hello" not in texts[0]
    assert prepared.counts.trained == int((labels >= 0).sum())
    assert prepared.counts.tokens + prepared.counts.filled == ids.size
    assert (positions == 0).sum() >= 40
    assert prepared.fingerprint == fingerprint(all_rows(prepared))
    assert prepared.max_id == ids.max()
    assert prepared.show_sample() == "<user>hello <assistant>[[world <|endoftext|>]]"


def test_the_length_of_documents_is_that_in_which_a_token_is_found(tokenizer: Any, tmp_path: Path) -> None:
    rows = [
        [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world " * words}]
        for words in (600, 600, 100, 100)
    ]
    file = tmp_path / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows), encoding="utf-8")
    prepared = prepare(tokenizer, file, seq_len=2048)
    _, _, positions = split_words(all_rows(prepared))
    lengths = np.diff(np.append(np.flatnonzero(positions == 0), positions.size))
    mean = (lengths**2).sum() / lengths.sum()
    assert len(lengths) >= 4
    assert prepared.document_len is not None
    assert 0 <= prepared.document_len - mean < 64 + 1
    assert prepared.document_len % 64 == 0
    assert prepare(tokenizer, file, seq_len=2048, way="pad").document_len is None


def test_the_counts_are_of_the_examples_that_are_kept(tokenizer: Any, tmp_path: Path) -> None:
    """As many as the lines before say: one that the encoder refuses is dropped there, and counts no more."""
    file = write_chats(tmp_path, 2)
    with file.open("a") as more:
        for turn in ({"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}):
            more.write(json.dumps({"messages": [turn, turn]}) + "\n")
    prepared = prepare(tokenizer, file)
    assert prepared.read[0].endswith(": messages; 4 rows read, 2 examples kept, 2 dropped")
    assert prepared.counts.examples == 3
    assert prepared.describe().startswith("2 examples, ")


def test_rows_that_are_far_too_wide_are_said(tokenizer: Any, tmp_path: Path) -> None:
    """Where each is of one example, which no setting of packing fills up."""
    file = tmp_path / "pairs.jsonl"
    rows = [{"prompt": "a", "chosen": " b" * 3 + "c" * n, "rejected": " d"} for n in range(3)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    judged: dict[str, Any] = {"way": "dpo", "loss": "dpo"}
    wide = prepare(tokenizer, file, seq_len=64, **judged)
    longest = wide.counts.longest
    assert 8 < longest <= 16
    share = 1 - wide.counts.tokens / (3 * 2 * 64)
    assert [line for line in wide.notes() if "padding" in line] == [
        f"{share:.0%} of what is computed is padding: the longest row has {longest} tokens, so "
        "data.seq_len=16 trains on the same in less time"
    ]
    assert not any("padding" in line for line in prepare(tokenizer, file, seq_len=31, **judged).notes())
    packed = prepare(tokenizer, write_chats(tmp_path, 1), seq_len=512)
    assert packed.padding > 0.9
    assert not any("padding:" in line for line in packed.notes()), "more examples would fill it"


def test_what_the_template_leaves_out_is_warned_of(tokenizer: Any, tmp_path: Path) -> None:
    """Once, and of what the data holds alone; a template that writes it is not blamed."""
    system = {"role": "system", "content": "be brief"}
    asked, thought = {"role": "user", "content": "hello"}, {"reasoning_content": "so", "content": "world"}
    answer = {"role": "assistant", "content": "world"}
    call = {"function": {"name": "add", "arguments": {}}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    file = tmp_path / "told.jsonl"

    def warned(*rows: dict[str, Any], template: str = TEMPLATE) -> str | None:
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return prepare(tokenizer, file, template=template).warning

    whole = [system, asked, {**answer, **thought}]
    assert warned({"messages": [system, asked, answer]}) is None
    assert warned({"messages": whole}) == (
        "the chat template leaves out what the data holds of reasoning: the model never sees it; give a "
        "template that writes it (data.chat_template)"
    )
    mute = "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}" + TEMPLATE
    said = str(warned({"messages": whole, "tools": tools}, {"messages": [asked, answer]}, template=mute))
    assert said.startswith("the chat template leaves out what the data holds of system prompts and tools and")
    thinks = TEMPLATE.replace("{{ message['content'] }}", "{{ message.thinking }}{{ message['content'] }}")
    assert warned({"messages": whole}, template=thinks) is None
    calls = thinks.replace(
        "{{ message.th", "{{ message.tool_calls | tojson if message.tool_calls }}{{ message.th"
    )
    beside = {"messages": [asked, {**answer, **thought, "tool_calls": [call]}, answer]}
    assert warned(beside, template=calls) is None


def test_several_processes_give_the_same_rows(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of them runs the script that asks for them, which may have no guard."""
    file = write_chats(tmp_path, 600)
    script, trace = tmp_path / "script.py", tmp_path / "ran"
    script.write_text(f"open({str(trace)!r}, 'w')\nraise SystemExit(1)\n")
    main = ModuleType("__main__")
    main.__file__ = str(script)
    monkeypatch.setitem(sys.modules, "__main__", main)
    assert prepare(tokenizer, file, workers=2).fingerprint == prepare(tokenizer, file).fingerprint
    assert not trace.exists()
    assert sys.modules["__main__"] is main


def test_prepared_data_is_made_once(tokenizer: Any, tmp_path: Path) -> None:
    file = write_chats(tmp_path)
    first = prepare(tokenizer, file, tmp_path / "kept")
    file.unlink()  # and would be missed
    second = prepare(tokenizer, file, tmp_path / "kept")
    assert np.array_equal(all_rows(first), all_rows(second))
    assert second.notes() == first.notes()
    assert second.counts == first.counts


@pytest.mark.parametrize("damage", ["short rows", "no rows", "a flipped bit", "half a manifest"])
def test_damaged_rows_are_made_anew(tokenizer: Any, tmp_path: Path, damage: str) -> None:
    file = write_chats(tmp_path)
    whole = prepare(tokenizer, file, tmp_path / "kept").fingerprint
    place = tmp_path / "kept" / "key"
    if damage == "short rows":
        os.truncate(place / "rows.bin", 100)
    elif damage == "no rows":
        (place / "rows.bin").unlink()
    elif damage == "a flipped bit":
        data = bytearray((place / "rows.bin").read_bytes())
        data[len(data) // 2] ^= 1
        (place / "rows.bin").write_bytes(data)
    else:
        (place / "manifest.json").write_text('{"shape": [3', encoding="utf-8")
    again = prepare(tokenizer, file, tmp_path / "kept")
    assert again.fingerprint == whole == fingerprint(all_rows(again))


def test_process_that_is_killed_leaves_nothing_that_is_used(tokenizer: Any, tmp_path: Path) -> None:
    """Killed with rows on the disk and no manifest; the next one begins anew, and removes what was left."""
    file, kept = write_chats(tmp_path), tmp_path / "kept"
    code = (
        "import sys, time, pathlib\nimport numpy as np\n"
        "from megatrain.data.cache import RowWriter, kept_rows\n"
        "def make(place):\n"
        "    writer = RowWriter(place, 32)\n    writer.write(np.ones((9, 32), dtype=np.int32))\n"
        "    writer.close()\n    print('written', flush=True)\n    time.sleep(60)\n"
        "kept_rows(pathlib.Path(sys.argv[1]), 'key', make)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(kept)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"written\n"
    assert find_rows(kept, "key") is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert find_rows(kept, "key") is None
    started = time.monotonic()
    prepared = prepare(tokenizer, file, kept)
    assert time.monotonic() - started < 50  # the lock went with the process
    assert prepared.fingerprint == prepare(tokenizer, file).fingerprint
    assert sorted(path.name for path in kept.iterdir()) == [".lock-key", "key"]


def test_rows_that_are_kept_nowhere_leave_no_file(tokenizer: Any, tmp_path: Path) -> None:
    file = write_chats(tmp_path)
    (tmp_path / "tmp").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
        prepared = prepare(tokenizer, file)
    assert list((tmp_path / "tmp").iterdir()) == []
    assert len(all_rows(prepared)) == len(prepared.rows) > 0


# -- what is counted -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("too_long", "kept", "num_rows", "cut"), [("truncate", 1, 1, 8), ("drop", 0, 0, 0), ("split", 1, 1, 8)]
)
def test_too_long_examples_are_counted(
    tokenizer: Any, tmp_path: Path, too_long: str, kept: int, num_rows: int, cut: int
) -> None:
    """A prompt of 3 tokens, an answer of 21."""
    file = tmp_path / "a.jsonl"
    turns = [{"role": "user", "content": ""}, {"role": "assistant", "content": "zq" * 10}]
    file.write_text(json.dumps({"messages": turns}) + "\n" + write_chats(tmp_path, 1).read_text())
    (number,) = (
        len(words) for words in [tokenizer("<user><assistant>" + "zq" * 10 + "<|endoftext|>")["input_ids"]]
    )
    prepared = prepare(tokenizer, file, seq_len=16, too_long=too_long)
    assert prepared.counts.examples == 2
    assert prepared.counts.too_long == 1
    assert prepared.counts.kept == 1 + kept
    assert prepared.counts.cut_tokens == (0 if too_long == "split" else number - 16 if kept else number)
    assert "1 example longer than data.seq_len 16" in "\n".join(prepared.notes())


@pytest.mark.parametrize(
    ("seq_len", "way", "expected"),
    [
        (32, "truncate", "<user>a<assistant>bb<|endoftext|><user>c<assistant>[[dddd<|endoftext|>]]"),
        (19, "truncate", "<user>a<assistant>bb<|endoftext|><user>c<assistant>[[dd]]"),
        (17, "truncate", None),
        (17, "split", "d[[ddd<|endoftext|>]]"),
        (19, "drop", None),
    ],
)
def test_a_last_turn_that_is_cut(tmp_path: Path, seq_len: int, way: str, expected: str | None) -> None:
    """What is left of the last turn is trained on, and a chat of which nothing is left is dropped."""
    bpe = train_tokenizer(["<user><assistant>"] * 9, 300)
    turns = [("user", "a"), ("assistant", "bb"), ("user", "c"), ("assistant", "dddd")]
    row = json.dumps({"messages": [{"role": role, "content": text} for role, text in turns]})
    (tmp_path / "a.jsonl").write_text(row + "\n")
    if expected is None:
        with pytest.raises(DataError, match=r"none of 1 example can be trained on \(1 longer than"):
            prepare(bpe, tmp_path / "a.jsonl", seq_len=seq_len, too_long=way, last_only=True)
        return
    prepared = prepare(bpe, tmp_path / "a.jsonl", seq_len=seq_len, too_long=way, last_only=True)
    assert prepared.show_sample() == expected
    assert prepared.ends == ([bpe.eos_token_id] if expected.endswith("<|endoftext|>]]") else [])
    assert prepared.counts.tokens + prepared.counts.cut_tokens == len(bpe(TEXT)["input_ids"])


def test_a_row_that_is_all_masked_is_dropped_and_named(tokenizer: Any, tmp_path: Path) -> None:
    file = write_chats(tmp_path, 2)
    with file.open("a", encoding="utf-8") as rows:
        turns = [{"role": "user", "content": "x" * 40}, {"role": "assistant", "content": "y"}]
        rows.write(json.dumps({"messages": turns}) + "\n")
    prepared = prepare(tokenizer, file)
    assert prepared.counts.kept == 2
    expected = f"dropped: no token of it is trained on within data.seq_len: 1 ({file}:3)"
    assert expected in "\n".join(prepared.notes())


def test_a_share_that_holds_out_every_example_is_named(tokenizer: Any, tmp_path: Path) -> None:
    file = write_chats(tmp_path, 1)
    with pytest.raises(DataError, match=r"data\.val_size leaves nothing here: .*0 examples kept, 1 held out"):
        prepare(tokenizer, file, data=DataConfig(path=(str(file),), val_size=0.999))


def test_a_run_without_a_token_to_train_on_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        json.dumps(
            {
                "messages": [
                    {"role": "user", "content": "a"},
                    {"role": "assistant", "content": "b", "loss_weight": 0.0},
                ]
            }
        )
        + "\n"
    )
    with pytest.raises(
        DataError, match=r"none of 1 example can be trained on .*prompts\.jsonl:1.*data\.train_on"
    ):
        prepare(tokenizer, file)


def test_chats_are_not_joined(tokenizer: Any, tmp_path: Path) -> None:
    with pytest.raises(NotTextError, match=r"chats\.jsonl:1: data\.packing=join is for plain text"):
        prepare(tokenizer, write_chats(tmp_path), way="join")


def test_text_that_is_joined_has_no_flags(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_text("hello world and more\n" * 40, encoding="utf-8")
    prepared = prepare(tokenizer, file, way="join", seq_len=8)
    ids = [*tokenizer(file.read_text(encoding="utf-8"))["input_ids"], tokenizer.eos_token_id]
    assert all_rows(prepared).ravel().tolist() == ids[: len(ids) // 8 * 8]
    apart = prepare(tokenizer, file, seq_len=8)
    assert (split_words(all_rows(apart))[2] == 0).sum() == len(
        ids
    ) // 8  # a piece of one token has nothing to learn
    assert (prepared.ends, apart.ends) == (None, None)


# -- the loader over rows in a file ----------------------------------------------------------------------


@pytest.mark.parametrize(("way", "seq_len"), [("best_fit", 32), ("best_fit", 27), ("pad", 32), ("pad", 8)])
def test_what_fills_rows_up_is_not_counted_as_read(
    tokenizer: Any, tmp_path: Path, way: str, seq_len: int
) -> None:
    prepared = prepare(tokenizer, write_chats(tmp_path), way=way, seq_len=seq_len)
    loader = PackedLoader(prepared.rows, micro_batch_size=1, num_micro_batches=1, seed=0, packing=way)
    read = [loader.num_tokens for _ in islice(loader, len(prepared.rows))]
    assert sum(read) == prepared.counts.tokens
    assert (max(read) == seq_len) is (way == "best_fit" or seq_len == 8)


def test_the_loader_goes_on_over_rows_in_a_file(tokenizer: Any, tmp_path: Path) -> None:
    prepared = prepare(tokenizer, write_chats(tmp_path), tmp_path / "kept")

    def make() -> PackedLoader:
        return PackedLoader(
            prepared.rows,
            micro_batch_size=2,
            num_micro_batches=2,
            seed=1,
            packing="best_fit",
            name=prepared.fingerprint,
        )

    loader = make()
    next(loader)
    state = json.loads(json.dumps(loader.state()))
    expected = [next(loader) for _ in range(5)]
    resumed = make()
    resumed.restore(state)
    for step in expected:
        for mine, theirs in zip(next(resumed), step, strict=True):
            assert sorted(mine) == ["input_ids", "labels", "position_ids"]
            assert all(mine[name].equal(theirs[name]) for name in mine)
    other = prepare(tokenizer, write_chats(tmp_path, 39))
    with pytest.raises(DataError, match="way of packing or masking"):
        PackedLoader(
            other.rows,
            micro_batch_size=2,
            num_micro_batches=2,
            seed=1,
            packing="best_fit",
            name=other.fingerprint,
        ).restore(state)


def test_some_rows_are_those_of_their_numbers(tmp_path: Path) -> None:
    rows = np.arange(12, dtype="<i4").reshape(4, 3)
    (tmp_path / "rows.bin").write_bytes(rows.tobytes())
    whole = RowFile(tmp_path / "rows.bin", (4, 3))
    assert whole[[2, 0]].tolist() == rows[[2, 0]].tolist()
    some = SomeRows(whole, np.array([3, 1]))
    assert len(some) == 2
    assert some[range(2)].tolist() == rows[[3, 1]].tolist()
    with pytest.raises(DataError, match="48 bytes, not those of 5 rows"):
        RowFile(tmp_path / "rows.bin", (5, 3))


def test_examples_that_are_dropped_for_their_length_are_counted_and_warned_of(
    tokenizer: Any, tmp_path: Path
) -> None:
    file = write_chats(tmp_path, 70)
    dropped = prepare(tokenizer, file, seq_len=20, too_long="drop")
    count = 70 - dropped.counts.kept
    assert 0 < count == dropped.counts.too_long
    assert dropped.read[0].endswith(f"{70 - count} examples kept, {count} dropped")
    assert f"dropped: it is longer than data.seq_len (data.too_long=drop): {count} (" in dropped.read[1]
    assert dropped.warning is not None
    assert f"{count} of 70 examples are left out, since they are longer than" in dropped.warning
    stops = DataConfig(path=str(file), on_bad_row="stop")  # type: ignore[arg-type]
    assert prepare(tokenizer, file, data=stops, seq_len=20, too_long="drop").counts == dropped.counts


@pytest.mark.parametrize("label", [0, -100])
def test_an_end_that_labels_leave_out_is_not_trained_on(tokenizer: Any, tmp_path: Path, label: int) -> None:
    file = tmp_path / "tokens.jsonl"
    file.write_text(json.dumps({"input_ids": [70, 71, 0], "labels": [-100, 71, label]}))
    assert prepare(tokenizer, file).ends == ([] if label else [0])


def test_a_pair_that_is_equal_as_far_as_it_fits_is_dropped(tokenizer: Any, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    rows = [("hello hello good", "hello hello bad"), ("good", "bad")]
    file.write_text("\n".join(json.dumps({"prompt": "x", "chosen": a, "rejected": b}) for a, b in rows))
    prepared = prepare(tokenizer, file, way="dpo", loss="dpo", seq_len=4)
    assert (prepared.counts.kept, prepared.rows.shape[0]) == (1, 1)
    assert prepared.ends == []
    assert prepare(tokenizer, file, way="dpo", loss="dpo").ends == [tokenizer.eos_token_id]
    assert "dropped: chosen and rejected are the same within data.seq_len: 1" in prepared.read[1]


def test_answers_behind_the_end_of_a_row_are_warned_of(tokenizer: Any, tmp_path: Path) -> None:
    """Every seventh prompt has one word, the next two, and so on: a short row cuts the long ones off."""
    file = write_chats(tmp_path, 70)
    fits = prepare(tokenizer, file)
    assert (fits.counts.cut_off, fits.warning) == (0, None)
    short = prepare(tokenizer, file, seq_len=8)
    assert short.counts.cut_off == 70 - short.counts.kept > 0
    assert short.warning is not None
    assert f"{short.counts.cut_off} of 70 examples are left out" in short.warning
    assert "begins behind data.seq_len 8; raise data.seq_len" in short.warning
