"""Several sources in one stream: order, weights, parts, and going on from a position."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatrain.config.sections.data import DataConfig, SourceConfig
from megatrain.data.read.examples import ExampleStream, read_eval_examples, read_examples
from megatrain.data.read.parts import Part
from megatrain.errors import DataError

NUM = {"a": 40, "b": 10, "c": 25}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a directory with sources a, b and c, of which some rows are bad."""
    for name, count in NUM.items():
        lines = [json.dumps({"text": f"{name}{n}"}) for n in range(count)]
        lines.insert(3, "{")
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return tmp_path


def config_of(folder: Path, weights: dict[str, float] | None = None, **settings: Any) -> DataConfig:
    paths = [str(folder / f"{name}.jsonl") for name in NUM]
    if weights:
        sources = [
            SourceConfig(path=path, weight=weight)
            for path, weight in zip(paths, weights.values(), strict=True)
        ]
        return DataConfig(path=tuple(sources), **settings)
    return DataConfig(path=tuple(paths), **settings)


def texts(stream: ExampleStream) -> list[str]:
    return [example.text for example in stream]  # type: ignore[union-attr]


ALL = [f"{name}{n}" for name, count in NUM.items() for n in range(count)]
WEIGHTS = {"a": 6.0, "b": 3.0, "c": 1.0}


def test_sources_come_one_after_the_other(folder: Path) -> None:
    stream = read_examples(config_of(folder))
    assert texts(stream) == ALL
    assert (stream.report.num_rows, stream.report.num_kept, stream.report.num_dropped) == (78, 75, 3)


def test_max_samples_is_of_usable_rows_of_each_source(folder: Path) -> None:
    stream = read_examples(config_of(folder, max_samples=5))
    assert texts(stream) == [f"{name}{n}" for name in NUM for n in range(5)]
    assert [source.num_rows for source in stream.report.sources] == [6, 6, 6]  # and one of them bad


def test_weights_decide_how_often_a_source_is_drawn(folder: Path) -> None:
    """A pass ends when each has been read to its end; smaller ones start over, and count once."""
    config = config_of(folder, WEIGHTS)
    stream = read_examples(config, seed=1)
    found = texts(stream)
    assert set(found) == set(ALL)
    for name in NUM:
        own = [text for text in found if text[0] == name]
        assert own == [f"{name}{n % NUM[name]}" for n in range(len(own))]
    shares = {name: count / len(found) for name, count in Counter(text[0] for text in found).items()}
    assert shares == pytest.approx({"a": 0.6, "b": 0.3, "c": 0.1}, abs=0.05)
    assert stream.report.num_kept == 75
    assert texts(read_examples(config, seed=1)) == found
    assert texts(read_examples(config, seed=2)) != found


def test_a_mixture_may_end_with_its_first_source(folder: Path) -> None:
    found = texts(read_examples(config_of(folder, WEIGHTS, mixture_ends="first_exhausted"), seed=1))
    assert len(set(found)) == len(found)
    assert any(f"{name}{count - 1}" in found for name, count in NUM.items())


@pytest.mark.parametrize(("val_size", "count"), [(0.2, 15), (0.5, 37), (7, 7), (74, 74), (1, 1)])
def test_what_is_held_out_is_left_out_of_training(folder: Path, val_size: float, count: int) -> None:
    config = config_of(folder, val_size=val_size)
    stream = read_examples(config, seed=5)
    train = texts(stream)
    held = texts(read_eval_examples(config, seed=5)["val"])
    assert len(held) == pytest.approx(count, abs=0 if val_size >= 1 else 2)
    assert sorted(train + held) == sorted(ALL)
    assert stream.report.sources[0].num_other_part == len([text for text in held if text[0] == "a"])
    assert texts(read_examples(config, seed=5, part=Part.EVAL)) == held
    others = [texts(read_examples(config, seed=seed, part=Part.EVAL)) for seed in range(6, 9)]
    assert any(other != held for other in others)


def test_what_is_held_out_is_spread_evenly(folder: Path) -> None:
    held = texts(read_examples(config_of(folder, val_size=0.2), part=Part.EVAL))
    numbers = [int(text[1:]) for text in held if text[0] == "a"]
    assert [number // 5 for number in numbers] == list(range(8))


def test_more_held_out_than_there_is_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data.val_size is 75, and there are 75 examples"):
        read_examples(config_of(folder, val_size=75))


def test_evaluation_sets_have_names(folder: Path) -> None:
    path = str(folder / "c.jsonl")
    config = DataConfig(
        path=(str(folder / "a.jsonl"),),
        val_size=4,
        eval_path={"chat": (path,), "all": (path, str(folder / "b.jsonl"))},
    )
    found = read_eval_examples(config)
    assert {name: len(texts(stream)) for name, stream in found.items()} == {"val": 4, "chat": 25, "all": 35}
    with pytest.raises(DataError, match="a set val"):
        read_eval_examples(DataConfig(path=(path,), val_size=4, eval_path={"val": (path,)}))


def test_an_example_that_is_left_out_later_is_counted_too(folder: Path) -> None:
    stream = read_examples(config_of(folder))
    first = next(stream)
    stream.report.drop(first.source, "nothing to train on")
    assert stream.report.num_kept == 0
    assert str(stream.report.sources[0].dropped["nothing to train on"]) == f"1 ({first.source})"
    stream.report.stops = True
    with pytest.raises(DataError, match=f"{first.source}: nothing to train on"):
        stream.report.drop(first.source, "nothing to train on")


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    """Of rows in one line each and of one array alike: a file five times as large takes no more."""
    import tracemalloc

    def peak(name: str, count: int) -> int:
        row = json.dumps({"text": "word " * 2000})
        path = tmp_path / name
        path.write_text("[" + ",".join([row] * count) + "]" if name.endswith("json") else f"{row}\n" * count)
        tracemalloc.start()
        assert sum(1 for _ in read_examples(DataConfig(path=(str(path),)))) == count
        used = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return used

    for name in ("a.jsonl", "a.json"):
        peak(name, 10)
        small, large = peak(name, 300), peak(name, 1_500)
        assert large < 1.1 * small + 100_000, name
