"""What a path can be: files of every kind, directories, patterns, saved and hub datasets."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatrain.config.sections.data import DataConfig, SourceConfig
from megatrain.data.example import TextExample
from megatrain.data.read import arrow_rows, text_rows
from megatrain.data.read.content import content_of
from megatrain.data.read.examples import read_examples
from megatrain.data.row import RowError
from megatrain.errors import DataError

ROWS = [
    {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": f"a{n}"}]}
    for n in range(600)
]
"""More than one batch of a reader."""


def answers(path: object, **settings: Any) -> list[tuple[str, int]]:
    stream = read_examples(DataConfig(path=(str(path),), **settings))
    return [(example.messages[-1].content, example.source.row) for example in stream]  # type: ignore[union-attr]


EXPECTED = [(f"a{n}", n + 1) for n in range(600)]


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path) -> None:
    import datasets

    dataset = datasets.Dataset.from_list(ROWS)
    dataset.to_parquet(tmp_path / "a.parquet")
    dataset.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=dataset, test=dataset.select(range(3))).save_to_disk(tmp_path / "splits")
    (tmp_path / "a.json").write_text(json.dumps(ROWS, indent=1))
    text = "".join(json.dumps(row) + "\n" for row in ROWS)
    (tmp_path / "a.jsonl").write_text(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    arrow = next((tmp_path / "saved").glob("*.arrow"))
    for path in ("a.parquet", "saved", "splits", "a.json", "a.jsonl", "a.jsonl.gz", arrow):
        assert answers(tmp_path / path) == EXPECTED, path
    assert answers(tmp_path / "splits", split="test") == EXPECTED[:3]
    with pytest.raises(DataError, match=r"has no split dev; it has train, test; check data.split"):
        answers(tmp_path / "splits", split="dev")


def test_columnar_rows_have_no_keys_of_other_rows(tmp_path: Path) -> None:
    """Parquet gives every tool the parameters of all tools, as null; null itself is lost with them."""
    import datasets

    rows = [{**ROWS[0], "tools": [{"name": name, "parameters": {name: 1}}]} for name in ("f", "g")]
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "a.parquet")
    examples = list(read_examples(DataConfig(path=(str(tmp_path / "a.parquet"),))))
    assert [example.tools[0]["function"] for example in examples] == [  # type: ignore[union-attr]
        {"name": "f", "parameters": {"f": 1}},
        {"name": "g", "parameters": {"g": 1}},
    ]


def test_images_of_a_dataset_are_not_decoded(tmp_path: Path) -> None:
    """A row with one is left out for what it is, without a library for images."""
    import datasets

    images = [None, {"bytes": b"no image at all", "path": None}]
    rows = [{**row, "image": image} for row, image in zip(ROWS[:2], images, strict=True)]
    dataset = datasets.Dataset.from_list(rows).cast_column("image", datasets.Image())
    dataset.save_to_disk(tmp_path / "saved")
    assert answers(tmp_path / "saved") == EXPECTED[:1]


def test_csv_cells_are_the_text_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('id,prompt,completion\n1,p,007\n2,"a ""b"", c","x\ny"\n3,p,NA\n4,p,2020-01-01\n')
    stream = read_examples(DataConfig(path=(str(path),)))
    assert [(example.completion, example.source.row) for example in stream] == [  # type: ignore[union-attr]
        ("007", 2),
        ("x\ny", 3),
        ("NA", 5),
        ("2020-01-01", 6),
    ]
    (tmp_path / "b.csv").write_text("prompt;completion\np;1,5\n")
    (tmp_path / "c.tsv").write_text("prompt\tcompletion\np\t1,5\n")
    for name in ("b.csv", "c.tsv"):
        (example,) = read_examples(DataConfig(path=(str(tmp_path / name),)))
        assert example.completion == "1,5"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", b"prompt,completion\rp,c\rq,d\r"),  # line ends of an old Mac
        ("a.csv", b"\n  \nprompt,completion\np,c\nq,d\n"),
        ("a.csv", b"sep=;\r\nprompt;completion\r\np;c\r\nq;d\r\n"),
        ("a.csv", b"SEP=|\nprompt|completion\np|c\nq|d\n"),
        ("a.csv", b'prompt, completion\n"p", "c"\nq, d\n'),
        ("a.csv", "prompt,completion\np,c\nq,d\n".encode("utf-16")),
        ("a.tsv", "prompt\tcompletion\r\np\tc\r\nq\td\r\n".encode("utf-16")),
    ],
)
def test_csv_is_read_as_spreadsheets_write_it(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    stream = read_examples(DataConfig(path=(str(tmp_path / name),)))
    assert [(example.prompt, example.completion) for example in stream] == [("p", "c"), ("q", "d")]  # type: ignore[union-attr]
    assert stream.report.num_dropped == 0


def test_a_header_may_have_lines(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text('"the\nprompt",completion\np,c\n')
    columns = {"prompt": "the\nprompt"}
    (example,) = read_examples(DataConfig(path=(str(tmp_path / "a.csv"),), columns=columns))
    assert (example.prompt, example.source.row) == ("p", 3)  # type: ignore[union-attr]


def test_a_quote_in_tsv_is_a_quote_or_holds_a_cell(tmp_path: Path) -> None:
    """A line with all its cells is a row, whatever quotes are in it."""
    path = tmp_path / "a.tsv"
    path.write_text(
        'prompt\tcompletion\np\t"begins so\nq\tends so"\n"r"\t"said ""s"" and\nwent on"\n'
        '"Hi" she said\tt\nu\tv "w"\n'
    )
    stream = read_examples(DataConfig(path=(str(path),)))
    assert [(example.prompt, example.completion, example.source.row) for example in stream] == [  # type: ignore[union-attr]
        ("p", '"begins so', 2),
        ("q", 'ends so"', 3),
        ("r", 'said "s" and\nwent on', 4),
        ('"Hi" she said', "t", 6),
        ("u", 'v "w"', 7),
    ]


def test_turns_in_csv_are_json(tmp_path: Path) -> None:
    import csv

    with (tmp_path / "a.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["messages"], *[[json.dumps(row["messages"])] for row in ROWS[:2]]])
    assert answers(tmp_path / "a.csv") == [("a0", 2), ("a1", 3)]


def test_a_directory_and_a_pattern_are_their_files(tmp_path: Path) -> None:
    for name, row in (
        ("b.jsonl", ROWS[1]),
        ("a.jsonl", ROWS[0]),
        ("in/c.jsonl", ROWS[2]),
        (".d.jsonl", ROWS[3]),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(row))
    (tmp_path / "README.md").write_text("about")
    assert answers(tmp_path) == [("a0", 1), ("a1", 1), ("a2", 1)]
    assert answers(tmp_path / "[ab].jsonl") == [("a0", 1), ("a1", 1)]
    assert answers(tmp_path / "**/*.jsonl") == [("a0", 1), ("a1", 1), ("a2", 1)]
    with pytest.raises(DataError, match="no file has such a name"):
        answers(tmp_path / "*.csv")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="is a directory without a file that is read"):
        answers(tmp_path / "empty")


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("revision", "commit", "read_at"),
    [(None, "c0ffee", "c0ffee"), ("v1", "decade", "decade"), ("v1", None, "v1"), (None, None, None)],
)
def test_a_hub_dataset_is_loaded_by_its_names(
    monkeypatch: pytest.MonkeyPatch,
    streaming: bool,
    revision: str | None,
    commit: str | None,
    read_at: str | None,
) -> None:
    """At the commit that the hub names for a revision; where it names none, at what was asked for."""
    import datasets

    asked: dict[str, Any] = {}
    commits = {("owner/chats", revision): commit}
    monkeypatch.setattr(arrow_rows, "hub_revision", lambda *asked: commits[asked])

    def load(path: str, **options: Any) -> Any:
        asked.update(options, path=path)
        dataset = datasets.Dataset.from_list(ROWS)
        return {"train_sft": dataset.to_iterable_dataset() if streaming else dataset, "gen": dataset}

    monkeypatch.setattr(datasets, "load_dataset", load)
    said = {"subset": "en", "revision": revision, "streaming": streaming}
    assert answers("owner/chats", split="train_sft", **said) == EXPECTED
    assert asked == {
        "path": "owner/chats",
        "name": "en",
        "data_dir": None,
        "streaming": streaming,
        "revision": read_at,
    }
    with pytest.raises(
        DataError, match=r"owner/chats has the splits train_sft, gen; choose one with data.split"
    ):
        answers("owner/chats", revision=revision, streaming=streaming)


def test_hub_data_is_known_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked once for each process, so that what is read is what is named; unknown, it has no name."""
    commits = iter(["c0ffee", "decade"])
    info = lambda self, path, revision, timeout: SimpleNamespace(sha=revision or next(commits))  # noqa: E731
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", info)
    (tmp_path / "a.jsonl").write_text("{}\n")
    sources = [SourceConfig(path="owner/chats"), SourceConfig(path=str(tmp_path / "a.jsonl"))]
    names = []
    for _ in range(2):
        arrow_rows.hub_revision.cache_clear()
        names.append(content_of(sources))
        assert content_of(sources) == names[-1]
    assert len({*names, None}) == 3
    arrow_rows.hub_revision.cache_clear()  # and there is no third commit
    assert content_of(sources) is None
    arrow_rows.hub_revision.cache_clear()
    fixed = [SourceConfig(path="owner/chats", revision="c0ffee"), sources[1]]
    assert content_of(fixed) == names[0], "what is asked for by its commit is known by it"
    arrow_rows.hub_revision.cache_clear()


def test_the_hub_out_of_reach_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    def load(path: str, **options: Any) -> Any:
        raise ConnectionError("Couldn't reach\nthe hub")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(
        DataError, match=r"^owner/chats is no local .* read from the Hugging Face hub, which is not asked"
    ):
        answers("owner/chats")


def test_a_large_text_file_is_cut_at_ends_of_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a corpus in one file is never in memory as a whole; a small one stays one document."""
    (tmp_path / "a.txt").write_text("first\nsecond\n\u00e9\u00e9\u00e9\u00e9\nlast", encoding="utf-8")
    config = DataConfig(path=(str(tmp_path / "a.txt"),))
    assert [example.text for example in read_examples(config)] == [  # type: ignore[union-attr]
        "first\nsecond\n\u00e9\u00e9\u00e9\u00e9\nlast"
    ]
    monkeypatch.setattr(text_rows, "MOST_DOCUMENT_BYTES", 8)
    examples = list(read_examples(config))
    assert [example.text for example in examples if isinstance(example, TextExample)] == [
        "first\nsecond\n",
        "\u00e9\u00e9\u00e9\u00e9\n",
        "last",
    ]


@pytest.mark.parametrize("rest", range(1, 6))
def test_a_large_text_file_without_line_ends_is_cut_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rest: int
) -> None:
    """Between two characters, wherever the pieces end."""
    text = "a\u00e9\U0001f600b\u20ac" * 7
    file = tmp_path / "a.txt"
    file.write_text(text, encoding="utf-8")
    monkeypatch.setattr(text_rows, "MOST_DOCUMENT_BYTES", 8)
    monkeypatch.setattr(text_rows, "_MOST_REST_BYTES", rest)
    rows = list(text_rows.read_txt(str(file)))
    parts = [row.value["text"] for row in rows if not isinstance(row.value, RowError)]
    assert "".join(parts) == text
    assert max(len(part.encode()) for part in parts) <= 8 + rest


def test_an_array_is_parsed_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the pieces end: inside words, escapes, numbers and characters of several bytes."""
    from megatrain.data.read import json_rows

    rows: list[dict[str, Any]] = [
        {"text": 'caf\u00e9 \U0001f600 "\\\n'},
        {"text": "x" * 50, "n": -12.5e3},
        {"text": "y", "n": 17},
    ]
    text = json.dumps([*rows, 123456], ensure_ascii=False, indent=1)  # the number is no row
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    for chunk in range(1, 24):
        monkeypatch.setattr(json_rows, "_CHUNK", chunk)
        stream: Any = read_examples(DataConfig(path=(str(tmp_path / "a.json"),)))
        assert [example.text for example in stream] == [row["text"] for row in rows]
        assert stream.report.num_dropped == 1


def test_entries_of_dataset_info(tmp_path: Path) -> None:
    """Columns that an entry does not name are not there, as in LLaMA-Factory; ours go before them."""
    entries = {
        "maths": {"file_name": "m.jsonl", "columns": {"prompt": "q", "response": "a"}, "num_samples": 2},
        "pairs": {
            "file_name": "m.jsonl",
            "ranking": True,
            "columns": {"prompt": "q", "chosen": "a", "rejected": "b"},
        },
        "online": {"ms_hub_url": "x/y"},
        "odd": {"file_name": "m.jsonl", "formatting": "xml"},
        "hub": {"hf_hub_url": "owner/chats", "subset": "en", "split": "gen", "folder": "f"},
    }
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    row = {"q": "q", "a": "a", "b": "b", "input": "not asked for", "system": "nor this"}
    (tmp_path / "m.jsonl").write_text("\n".join([json.dumps(row)] * 3))
    chats: Any = read_examples(DataConfig(path=(str(tmp_path),), dataset=("maths",)))
    assert [[message.content for message in example.messages] for example in chats] == [["q", "a"]] * 2
    source = SourceConfig(path=str(tmp_path / "dataset_info.json"), dataset="pairs", name="mine")
    stream = read_examples(DataConfig(path=(source,)))
    pairs: Any = list(stream)
    assert [(pair.prompt[0].content, pair.rejected[0].content) for pair in pairs] == [("q", "b")] * 3
    assert stream.report.sources[0].name == "mine"
    for name, sentence in {
        "online": "entry online: its rows are at ms_hub_url, which is not read",
        "odd": "entry odd: formatting xml is not known; it must be alpaca, sharegpt or openai",
        "none": "has no entry none; it has maths, pairs, online, odd, hub; check data.dataset",
    }.items():
        with pytest.raises(DataError, match=sentence):
            read_examples(DataConfig(path=(str(tmp_path),), dataset=(name,)))
    with pytest.raises(DataError, match=r"has 5 entries; choose with data.dataset: maths, pairs"):
        read_examples(DataConfig(path=(str(tmp_path / "dataset_info.json"),)))
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(DataError, match=r"dataset_info.json is not valid JSON"):
        read_examples(DataConfig(path=(str(tmp_path),), dataset=("maths",)))
