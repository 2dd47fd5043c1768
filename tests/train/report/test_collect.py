"""Numbers of a run directory, whatever state it is in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.errors import OutputError
from megatrain.train.records.directory import RunDirectory
from megatrain.train.report.card import model_card, plan_and_fact
from megatrain.train.report.collect import columns, read_run
from megatrain.train.report.page import page_data, report_page
from megatrain.train.report.ranks import ranks_of
from megatrain.train.report.texts import event_text
from tests.train.report.run_files import PLAN, write_run


def test_speed_leaves_out_the_first_step_and_weighs_by_time(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a"))
    assert run.step_s == 0.5
    assert run.tokens_per_s == 2048
    assert run.last_loss == pytest.approx(sum(4.0 - 0.1 * step for step in range(11, 21)) / 10)
    assert (run.step, run.num_steps) == (20, 100)


@pytest.mark.parametrize(
    ("events", "age_s", "state"),
    [
        ([("start", 0, {})], 5, "running"),
        ([("start", 0, {})], 500, "silent"),
        ([("start", 0, {}), ("error", 3, {}), ("resume", 2, {})], 5, "running"),
        ([("start", 0, {}), ("stop", 3, {})], 5, "stopped"),
        ([("start", 0, {}), ("error", 3, {})], 5, "failed"),
        ([("start", 0, {}), ("error", 3, {}), ("resume", 2, {}), ("end", 9, {})], 500, "done"),
    ],
)
def test_state_is_that_of_the_last_process(
    tmp_path: Path, events: list[tuple[str, int, dict[str, object]]], age_s: float, state: str
) -> None:
    path = write_run(tmp_path / "a", events=events)
    with RunDirectory(path).lock():
        run = read_run(path)
    assert run.state(run.written_s + age_s) == state


def test_a_run_whose_process_is_gone_is_killed_at_once(tmp_path: Path) -> None:
    """As the lock of the directory tells, which ends with the process that holds it."""
    path = write_run(tmp_path / "a")
    with RunDirectory(path).lock():
        alive = read_run(path)
    dead = read_run(path)
    assert (alive.state(alive.written_s), dead.state(dead.written_s)) == ("running", "killed")
    with RunDirectory(path).lock():  # looking has left no lock
        assert RunDirectory(path).is_in_use


def test_long_curves_are_means_of_equal_groups(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "a", num_rows=25, loss=float))
    found = columns(run, most=10)
    assert found["averaged"] == 3
    assert found["step"] == [3, 6, 9, 12, 15, 18, 21, 24, 25]
    assert found["loss"] == [2, 5, 8, 11, 14, 17, 20, 23, 25]
    assert found["waits"] == {"compute<-fetch slot": [0.125] * 9}
    assert found["lane_seconds"] == {"compute": [0.375] * 9, "fetch": [0.25] * 9}
    assert found["bound"] == {"compute": 19, "copies": 6}


def test_damaged_and_missing_files_leave_the_rest(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a")
    (run / "plan.json").write_text('{"pools": [')
    (run / "env.json").unlink()
    with open(run / "metrics.jsonl", "ab") as file:
        file.write(b'null\n{"step": "x"}\n{"step": 21, "loss": null}\n{"step": 22, "lo')
    read = read_run(run)
    assert (read.plan, read.environment, read.step) == ({}, {}, 21)
    assert columns(read)["loss"][-1] is None
    (run / "config.yaml").unlink()
    with pytest.raises(OutputError, match="is not a run directory"):
        read_run(run)


def test_values_of_another_kind_are_not_known(tmp_path: Path) -> None:
    """Of files that other hands have written to: nothing of them reaches a sum or a format."""
    run = write_run(tmp_path / "a")
    odd = {"step": 21, "loss": "x", "tokens": "y", "tokens_per_s": "z", "seconds": [1], "waits": [1]}
    with open(run / "metrics.jsonl", "a") as file:
        file.write(json.dumps(odd | {"lane_seconds": "s", "bound": {}}) + "\n")
        file.write('{"step": 22, "loss": NaN, "seconds": 1e999, "tokens": 1%s}\n' % ("0" * 400))
        file.write('{"step": true, "loss": 0.0}\n{"step": 23, "waits": {"a": "x"}}\n')
    with open(run / "events.jsonl", "a") as file:
        for event in (("evaluation", "x", 1), ("evaluation", 1.0, "y"), (["a"], 1.0, 1)):
            row = dict(zip(("event", "time", "step"), event, strict=True), loss=1.0)
            file.write(json.dumps(row) + "\n")
        file.write('{"event": "end", "time": 1e300, "step": 1}\n')
        file.write('{"event": "evaluation", "time": 1.0, "step": 1, "loss": 1e999, "name": "val"}\n')
    read = read_run(run)
    assert (read.step, len(read.events), read.evaluations()) == (23, 2, {})
    assert read.tokens_per_s == 2048.0
    assert read.last_loss == pytest.approx(4.0 - 0.1 * 15.5)
    found = columns(read)
    assert (found["loss"][-3:], found["seconds"][-3:], found["tokens"][-3:]) == ([None] * 3,) * 3
    assert report_page(read)


@pytest.mark.parametrize(
    "change",
    [
        {"pools": [{"tier": "device"}]},
        {"pools": ["x"]},
        {"pools": None},
        {"tokens_per_s": None},
        {"model": {"num_params": "8B"}},
        {"limits": 3},
    ],
)
def test_a_plan_of_another_form_is_none(tmp_path: Path, change: dict[str, Any]) -> None:
    run = write_run(tmp_path / "a", plan=PLAN | change)
    (run / "env.json").write_text('{"versions": [1], "cpus": NaN}')
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("https://hooks.example/secret-token", "http://[secret"))
    read = read_run(run)
    assert read.plan == {}
    assert read.config["log"]["webhook"] == "an address/..."
    assert "Plan and fact" not in model_card(run)
    assert "secret" not in report_page(read)


def test_event_in_words() -> None:
    row = {"event": "best", "time": 1.0, "step": 8, "name": "val", "loss": 2.123456789}
    assert event_text(row) == "best at step 8: name val, loss 2.12346"
    assert event_text({"event": "end", "time": 1.0, "step": 8}) == "end at step 8"
    assert (
        event_text({"event": "stop", "time": 1, "step": 8, "reason": "a signal"})
        == "stop at step 8: a signal"
    )
    assert event_text({"event": "end", "time": 1, "step": 8, "steps": 8, "waited_s": [0.25, 1.5]}) == (
        "end at step 8: steps 8, waited for others rank 0 0.25 s, rank 1 1.5 s"
    )
    codes, said = {"1": -9, "0": 7}, {"0": "rank 1 has ended"}
    row = {"event": "ranks", "time": 1, "step": 4, "codes": codes, "sentences": said, "left": 1}
    assert event_text(row) == (
        "ranks at step 4: rank 1 was killed (SIGKILL), rank 0 ended with 7 (rank 1 has ended); "
        "1 of the ranks go on"
    )
    assert event_text({**row, "codes": {"1": 2}, "sentences": {}, "left": 0}) == (
        "ranks at step 4: rank 1 ended with 2; none goes on"
    )


RANKS: list[tuple[str, int, dict[str, Any]]] = [
    ("start", 0, {"steps": 100, "ranks": 4, "nodes": 2, "shards": 4}),
    ("ranks", 4, {"codes": {"3": -9, "0": 7}, "sentences": {}, "left": 2}),
    ("resume", 4, {"steps": 100, "ranks": 2, "nodes": 1, "shards": 4}),
    ("end", 100, {"steps": 100, "waited_s": [0.25, 90.0]}),
]


def test_a_run_of_ranks_says_how_they_were(tmp_path: Path) -> None:
    columns: dict[str, Any] = {
        "exchanged_bytes": 2**20,
        "gathered_bytes": 2**19,
        "spread_bytes": 0,
        "swapped_bytes": 0,
    }
    run = read_run(write_run(tmp_path / "a", events=RANKS, **columns))
    ranks = ranks_of(run)
    assert ranks is not None
    assert ranks.facts == [
        ["ranks", "2, shards 4"],
        ["waited for other ranks", "0.25 s to 1m 30s"],
        ["between ranks in a step", "weights gathered 0.5 MiB, sums exchanged 1.0 MiB"],
        ["ranks lost", "at step 4"],
    ]
    data = page_data(run)
    assert data["ranks"]["waited_s"] == [0.25, 90.0]
    assert data["ranks"]["bytes"] == [["weights gathered", "0.5 MiB"], ["sums exchanged", "1.0 MiB"]]
    assert [text for _, text in data["ranks"]["lost"]] == [event_text(run.events[1])]
    assert all(fact in data["facts"] for fact in ranks.facts)
    before = read_run(write_run(tmp_path / "b", events=RANKS[:2]))
    assert ranks_of(before).now == "4 on 2 nodes, shards 4"  # type: ignore[union-attr]
    alone = read_run(write_run(tmp_path / "c"))
    assert ranks_of(alone) is None
    assert page_data(alone)["ranks"] is None


@pytest.mark.parametrize("waited_s", [["a"], "ab", [10**400], {"0": 1}, []])
def test_waits_of_another_kind_are_not_known(tmp_path: Path, waited_s: Any) -> None:
    run = read_run(write_run(tmp_path / "a", events=[*RANKS[:3], ("end", 9, {"waited_s": waited_s})]))
    assert ranks_of(run).waited_s == []  # type: ignore[union-attr]
    assert page_data(run)["ranks"]["waited_s"] == []


def test_a_plan_is_held_against_fact_without_padding(tmp_path: Path) -> None:
    """Steps are logged without it: of 4,096 tokens of a planned step a quarter is of the data."""
    for tokens, row in ((1024, ("tokens/s", "2,048")), (4096, ("tokens/s without padding", "512"))):
        plan = {**PLAN, "batch": {"tokens": tokens}}
        run = read_run(write_run(tmp_path / str(tokens), plan=plan))
        assert (*row, "2,048") in list(plan_and_fact(run))


def test_card_has_fact_beside_plan_and_no_path_of_this_machine(tmp_path: Path) -> None:
    from huggingface_hub import ModelCard

    events = [("evaluation", 20, {"name": "val", "loss": 2.5, "perplexity": 12.18})]
    card = model_card(write_run(tmp_path / "a", events=events))
    data = ModelCard(card).data.to_dict()
    assert data["base_model"] == "some/model"
    assert data["library_name"] == "transformers"
    for line in (
        "| data | `text.jsonl` |",
        "| tokens | 20,480 |",
        "| of these trained on | 20,000 |",
        "| val, held out | 20 | 2.5000 | 12.18 |",
        "| device | A Card |",
        "| time of a step | 0.5 s | 0.5 s |",
        "| tokens/s | 2,048 | 2,048 |",
        "| bound by | compute | copies |",
        "| state in host memory | 3.00 GiB | 3.00 GiB |",
        "| device memory, peak | 1.50 GiB | 1.00 GiB |",
        "| `optim.lr` | `0.0001` |",
    ):
        assert line in card.splitlines(), line
    for secret in ("somebody", str(tmp_path), "secret"):
        assert secret not in card
