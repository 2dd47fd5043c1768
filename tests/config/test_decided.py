"""What settings leave open of a run's numbers is decided by one set of rules, from model and data alone."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config import Config, build_config
from megatrain.config.choice import AUTO
from megatrain.config.decided import (
    as_begun,
    micro_batch_sizes,
    smaller_step_settings,
    smallest_micro_batches,
    with_micro_batches,
    with_rows,
    with_step,
)
from megatrain.config.defaults import default_batch
from megatrain.errors import ConfigError


def config_of(**sections: dict[str, Any]) -> Config:
    raw: dict[str, dict[str, Any]] = {"model": {"path": "DIR"}, "data": {"path": "a.txt"}}
    for section, values in sections.items():
        raw.setdefault(section, {}).update(values)
    return build_config(raw)


def step_of(
    config: Config, *, context: int | None = 32_768, on_cpu: bool = False, num_rows: int | None = None
) -> Config:
    return with_step(with_rows(config, context=context, on_cpu=on_cpu), on_cpu=on_cpu, num_rows=num_rows)


@pytest.mark.parametrize(
    ("context", "on_cpu", "found"),
    [
        (32_768, False, ("bf16", 4096, 131_072)),
        (None, False, ("bf16", 4096, 131_072)),
        (2048, False, ("bf16", 2048, 131_072)),
        (3000, False, ("bf16", 3000, 32 * 3000)),  # a power of two of rows, so that they can be shared out
        (32_768, True, ("fp32", 1024, 8192)),
        (512, True, ("fp32", 512, 8192)),
    ],
)
def test_model_and_kind_of_device_decide(
    context: int | None, on_cpu: bool, found: tuple[str, int, int]
) -> None:
    config = step_of(config_of(), context=context, on_cpu=on_cpu)
    assert (config.train.precision, config.data.seq_len, config.train.tokens_per_step) == found
    batch = default_batch(context, on_cpu=on_cpu)  # what `attach` plans for is the same
    assert (batch.seq_len, batch.tokens) == found[1:]


@pytest.mark.parametrize(
    ("num_rows", "train", "rows"),
    [
        (3169, {}, 32),  # 100 steps
        (3168, {}, 16),  # 99 would be too few
        (1600, {"epochs": 2}, 32),  # 100 in two passes
        (1600, {"steps": 10}, 32),  # a pass of 50; how many steps there are is the user's word
        (992, {"steps": 10}, 16),  # a pass of 31 is too short
        (993, {"steps": 10}, 32),
        (60, {"epochs": 50}, 1),
        (5, {}, 1),
    ],
)
def test_a_step_is_halved_until_the_run_has_enough_of_them(
    num_rows: int, train: dict[str, Any], rows: int
) -> None:
    assert step_of(config_of(train=train), num_rows=num_rows).rows_per_step == rows


def test_adapters_and_pairs_and_shards_have_a_rule_each() -> None:
    assert step_of(config_of(lora={"r": 8})).train.tokens_per_step == 32_768
    assert step_of(config_of(lora={"r": 8}), on_cpu=True).train.tokens_per_step == 8192
    pairs = step_of(config_of(train={"loss": "dpo"}))
    assert (pairs.rows_per_step, pairs.train.tokens_per_step) == (16, 131_072)
    assert with_micro_batches(pairs, 4).batch.micro_batch_size == 8, "of sequences"
    shards = step_of(config_of(parallel={"shards": 8}), num_rows=5)
    assert shards.rows_per_step == 8, "a row for each at least"
    assert micro_batch_sizes(step_of(config_of(parallel={"shards": 8})), 8) == [1, 2, 4]


@pytest.mark.parametrize(
    ("train", "found"),
    [
        ({"tokens_per_step": 500_000}, (499_712, AUTO, AUTO)),  # whole rows
        ({"tokens_per_step": 16_384, "micro_batch_size": 3}, (12_288, 3, 1)),
        ({"tokens_per_step": 32_768, "grad_accumulation": 4}, (32_768, 2, 4)),
        ({"micro_batch_size": 3}, (122_880, 3, 10)),
        ({"grad_accumulation": 8}, (131_072, 4, 8)),
        ({"grad_accumulation": 64}, (262_144, 1, 64)),
        ({"micro_batch_size": 3, "grad_accumulation": 5}, (61_440, 3, 5)),
        ({"tokens_per_step": 61_440, "micro_batch_size": 3, "grad_accumulation": 5}, (61_440, 3, 5)),
    ],
)
def test_what_is_given_of_a_step_is_kept(train: dict[str, Any], found: tuple[Any, ...]) -> None:
    config = step_of(config_of(train=train))
    sizes = config.train
    assert (sizes.tokens_per_step, sizes.micro_batch_size, sizes.grad_accumulation) == found


@pytest.mark.parametrize(
    "train",
    [
        {"tokens_per_step": 61_440, "micro_batch_size": 3, "grad_accumulation": 4},
        {"tokens_per_step": 100},
        {"tokens_per_step": 4096, "micro_batch_size": 2},
        {"tokens_per_step": 4096, "grad_accumulation": 2},
    ],
)
def test_a_contradiction_names_all_that_is_given(train: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="contradict each other") as early:
        config_of(train=train, data={"seq_len": 4096})
    with pytest.raises(ConfigError) as late:
        step_of(config_of(train=train))
    for key, value in train.items():
        assert f"train.{key}={value}" in str(early.value)
        assert f"train.{key}={value}" in str(late.value)
    assert "4,096 tokens (data.seq_len)" in str(early.value)


def test_sizes_of_micro_batches_are_powers_of_two_and_between_that_divide_what_each_run_has() -> None:
    config = step_of(config_of(train={"tokens_per_step": 589_824}, data={"seq_len": 1024}))
    assert micro_batch_sizes(config, 1) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64]
    assert micro_batch_sizes(config, 64) == [1, 3]
    assert micro_batch_sizes(step_of(config_of(memory={"lockstep": 8})), 1) == [1, 2, 4]
    with pytest.raises(ConfigError, match=r"train\.tokens_per_step=589824"):
        micro_batch_sizes(step_of(config_of(train={"tokens_per_step": 570_000}, data={"seq_len": 1024})), 64)


SAVED: dict[str, dict[str, Any]] = {
    "train": {"precision": "bf16", "micro_batch_size": 4, "grad_accumulation": 6},
    "data": {"seq_len": 512},
}
"""Of a checkpoint from before there was `train.tokens_per_step`."""


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, ("bf16", 512, 4, 6)),
        ({"train": {"tokens_per_step": 8192}}, ("bf16", 512, 4, 4)),
        ({"train": {"grad_accumulation": 12}}, ("bf16", 512, 4, 12)),
        ({"train": {"micro_batch_size": 2}}, ("bf16", 512, 2, 12)),
        ({"train": {"micro_batch_size": 2, "grad_accumulation": 1}}, ("bf16", 512, 2, 1)),
        ({"train": {"precision": "fp32"}, "data": {"seq_len": 1024}}, ("fp32", 1024, 4, 6)),
    ],
)
def test_a_run_that_goes_on_keeps_what_it_was_begun_with(
    given: dict[str, dict[str, Any]], found: tuple[Any, ...]
) -> None:
    config = step_of(as_begun(config_of(**given), SAVED), on_cpu=True, num_rows=7)
    sizes = config.train
    assert (sizes.precision, config.data.seq_len, sizes.micro_batch_size, sizes.grad_accumulation) == found
    assert config.is_decided


@pytest.mark.parametrize(
    ("saved", "given", "found"),
    [
        ({}, AUTO, 1.0),
        ({"activation_budget": 0.3}, AUTO, 0.3),
        ({"activation_budget": 0.3}, 0.5, 0.5),
        ({"activation_budget": AUTO}, AUTO, 1.0),
    ],
)
def test_a_run_that_goes_on_keeps_its_budget(saved: dict[str, Any], given: Any, found: float) -> None:
    """One from before there were any was compiled with all of it."""
    config = config_of(train={"activation_budget": given})
    begun = as_begun(config, {**SAVED, "train": {**SAVED["train"], **saved}})
    assert begun.train.activation_budget == found


def test_a_run_that_goes_on_keeps_its_tiles() -> None:
    def goes_on(now: Any, **then: Any) -> Any:
        config = config_of(train={"tile_tokens": now})
        return as_begun(config, {**SAVED, "train": {**SAVED["train"], **then}}).train.tile_tokens

    assert goes_on(AUTO, tile_tokens=256) == 256
    assert goes_on(512, tile_tokens=256) == 512
    assert goes_on(AUTO) == AUTO


def test_a_model_that_cannot_be_counted_is_compiled_with_all_of_it() -> None:
    """It is written down: a later version that counts the model would choose another one at a resume."""
    config = config_of(train={"micro_batch_size": 1, "tokens_per_step": 512}, data={"seq_len": 512})
    assert config.train.activation_budget == AUTO
    assert smallest_micro_batches(config).train.activation_budget == 1.0


def test_a_budget_that_is_not_counted_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"activation_budget is 0\.6.* must be auto or 1\.0 or 0\.7"):
        config_of(train={"activation_budget": 0.6})


@pytest.mark.parametrize(
    ("train", "words"),
    [
        ({}, "train.tokens_per_step=65536"),
        ({"micro_batch_size": 2}, "train.tokens_per_step=65536"),
        ({"tokens_per_step": 131_072}, "train.tokens_per_step=65536"),
        ({"micro_batch_size": 1, "grad_accumulation": 32}, "train.grad_accumulation=16"),
        ({"grad_accumulation": 32}, "train.tokens_per_step=65536 train.grad_accumulation=16"),
        (
            {"tokens_per_step": 131_072, "grad_accumulation": 32},
            "train.tokens_per_step=65536 train.grad_accumulation=16",
        ),
    ],
)
def test_half_a_step_is_said_in_the_settings_that_were_given(train: dict[str, Any], words: str) -> None:
    given = config_of(data={"seq_len": 4096}, train=train)
    assert smaller_step_settings(given, 2, 65_536) == words
    halved = {key.removeprefix("train."): int(value) for key, value in (w.split("=") for w in words.split())}
    tokens = []
    for chosen in (train, {**train, **halved}):
        found = with_micro_batches(step_of(config_of(data={"seq_len": 4096}, train=chosen)), 1)
        tokens.append(found.train.tokens_per_step)
    assert tokens[0] == 2 * tokens[1], tokens
