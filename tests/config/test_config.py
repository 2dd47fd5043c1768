"""Settings: what a file or an override may say, and the sentence for what it may not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.config import (
    Config,
    apply_overrides,
    build_config,
    config_keys,
    dump_config,
    load_config,
    read_config,
    replace_settings,
)
from megatrain.config.aliases import ALIASES
from megatrain.config.page import configuration_page
from megatrain.errors import ConfigError

NEEDED = ["model.path=m", "data.path=a.txt"]


def config_of(*overrides: str) -> Config:
    own = {"data.path", "dataset_dir"} & {override.partition("=")[0] for override in overrides}
    return build_config(apply_overrides({}, [*(NEEDED[:1] if own else NEEDED), *overrides]))


def problem_of(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides)
    assert caught.value.exit_code == 2
    return str(caught.value)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_defaults_are_complete() -> None:
    config = config_of()
    assert (config.data.path, config.data.seq_len, config.optim.lr) == (("a.txt",), "auto", 5e-5)
    assert (config.optim.betas, config.optim.max_grad_norm, config.optim.max_skipped_steps) == (
        (0.9, 0.95),
        1.0,
        10,
    )
    assert (config.memory.num_slots, config.train.precision, config.checkpoint.resume) == (
        None,
        "auto",
        "auto",
    )


def test_derived_values() -> None:
    config = config_of("train.seed=7")
    assert config.data_seed == 7
    assert config_of("data.seed=0", "train.seed=7").data_seed == 0


def test_file_then_overrides_then_defaults(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m}\ndata:\n  path: [a.txt, b.txt]\noptim:\n  lr: 1e-3\ntrain:\n")
    config = load_config(path, ["optim.lr=2e-3", "data.seq_len=64"])
    assert (config.optim.lr, config.data.seq_len, config.data.path) == (2e-3, 64, ("a.txt", "b.txt"))
    assert load_config(path).optim.lr == 1e-3


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("optim.lr=1e-3", 1e-3),
        ("optim.lr=1E-3", 1e-3),
        ("optim.lr=.5", 0.5),
        ("optim.lr=1", 1.0),
        ("optim.betas=[0.9, 0.999]", (0.9, 0.999)),
        ("optim.max_grad_norm=null", None),
        ("optim.no_decay=['*bias', '*.A_log']", ("*bias", "*.A_log")),
        ("optim.no_decay=[]", ()),
        ("optim.no_decay=null", None),
        ("optim.schedule_args={min_lr_rate: 0.1}", {"min_lr_rate": 0.1}),
        ("data.seq_len=1_024", 1024),
        ("data.shuffle=false", False),
        ("data.path=[a.txt, b.jsonl]", ("a.txt", "b.jsonl")),
        ("data.path=a=b.txt", ("a=b.txt",)),
        ("data.dataset=identity, alpaca_en_demo", ("identity", "alpaca_en_demo")),
        ("data.eval_path=e.jsonl", {"eval": ("e.jsonl",)}),
        ("data.eval_path={a: x, b: [y, z]}", {"a": ("x",), "b": ("y", "z")}),
        ("checkpoint.resume=no", "no"),
        ("memory.host_limit=24GiB", 24 * 2**30),
        ("memory.host_limit=1.5MiB", 3 * 2**19),
        ("memory.device_limit=500 MB", 500_000_000),
        ("memory.device_limit=4096", 4096),
        ("train.steps=010", 10),
        ("--train.steps=5", 5),
    ],
)
def test_override_means_what_it_looks_like(override: str, value: object) -> None:
    overrides = [override] if override.startswith("data.path") else [*NEEDED[1:], override]
    config: Any = build_config(apply_overrides({"model": {"path": "m"}}, overrides))
    for name in override.removeprefix("--").partition("=")[0].split("."):
        config = getattr(config, name)
    assert config == value
    assert type(config) is type(value)


@settings(deadline=None, max_examples=40)
@given(st.floats(min_value=1e-300, max_value=1e300))
def test_every_float_survives_an_override_and_a_file(lr: float) -> None:
    config = config_of(f"optim.lr={lr!r}")
    assert config.optim.lr == lr
    assert yaml.safe_load(dump_config(config))["optim"]["lr"] == lr


@settings(deadline=None, max_examples=40)
@given(st.text(min_size=1).filter(lambda text: not text.startswith("~")))
def test_dumped_config_reads_back_the_same(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Whatever the text looks like (a number, a date, yes, a comment), it comes back as that text."""
    config = build_config({"model": {"path": text}, "data": {"path": [text, "b"]}, "out": text})
    path = write(tmp_path_factory.getbasetemp(), dump_config(config))
    assert load_config(path) == config


@settings(deadline=None, max_examples=60)
@given(st.from_regex(r"\A[-+.:0-9eE_a-fxnoyf~]{1,8}\Z"))
def test_dumped_text_is_text_to_other_yaml_readers(text: str) -> None:
    config = build_config({"model": {"path": "m", "attn_implementation": text}, "data": {"path": "d"}})
    assert yaml.safe_load(dump_config(config))["model"]["attn_implementation"] == text


@settings(deadline=None)
@given(st.integers(min_value=1, max_value=10**12), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_sizes_are_exact(count: int, unit: str) -> None:
    power = ["KiB", "MiB", "GiB", "TiB"].index(unit) + 1
    assert config_of(f"memory.host_limit={count}{unit}").memory.host_limit == count * 1024**power


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("optim.learnrate=1", ["there is no key optim.learnrate", "optim has lr, betas"]),
        ("optim.schedul=linear", ["there is no key optim.schedul", "did you mean optim.schedule?"]),
        ("train.lr=1", ["there is no key train.lr", "did you mean optim.lr?"]),
        ("learning_rat=1", ["there is no key learning_rat", "did you mean optim.lr?"]),
        ("memory.zzz=1", ["there is no key memory.zzz", "num_slots", "host_limit"]),
        ("memory.tiers=3", ["memory.tiers is 3 (whole number)", "auto or a mapping of device and ram"]),
        ("memory.tiers={ram: -1}", ["memory.tiers is {'ram': -1}", "nvme (directories on drives)"]),
        ("memory.tiers={rams: 1GiB}", ["memory.tiers is {'rams': '1GiB'}", "auto or a mapping"]),
        ("memory.tiers={ram: 64GiB, nvme: []}", ["'nvme': []", "auto or a mapping"]),
        ("zzz=1", ["there is no key zzz", "the sections are model, data"]),
        ("train.steps=1.5", ["train.steps is 1.5 (number)", "whole number (1 or more) or null"]),
        ("train.steps=true", ["train.steps is true;", "whole number"]),
        ("train.steps='3'", ["train.steps is '3' (text)", "whole number"]),
        ("train.steps=0", ["train.steps is 0 (whole number)", "1 or more"]),
        ("train.precision=fp16", ["train.precision is 'fp16' (text)", "fp32 or bf16"]),
        ("optim.lr=fast", ["optim.lr is 'fast' (text)", "a number (above 0)"]),
        ("optim.lr=.nan", ["optim.lr is .nan (number)", "a number (above 0)"]),
        ("optim.betas=[0.9, 1.5]", ["optim.betas[1] is 1.5", "from 0 to below 1"]),
        ("optim.betas=0.9", ["optim.betas is 0.9", "two numbers"]),
        ("optim.max_grad_norm=0", ["optim.max_grad_norm is 0", "or null"]),
        ("optim.schedule=reduce_lr_on_plateau", ["optim.schedule", "warmup_stable_decay"]),
        ("data.shuffle=yes", ["data.shuffle is 'yes' (text)", "true or false"]),
        ("data.text_column=5", ["data.text_column is 5", "text; put it in quotes"]),
        ("data.path=[a, 1]", ["data.path[1] is 1 (whole number); it must be a path, a mapping"]),
        ("data.path={path: a, weigth: 2}", ["data.path[0]: there is no key weigth; a source has path, name"]),
        ("data.path=[a, {path: b, weight: 0}]", ["data.path[1]: weight: ", "greater than 0"]),
        ("data.columns={answer: output}", ["data.columns: answer is not one of text, instruction"]),
        ("data.format=chat", ["data.format is 'chat' (text)", "auto or text or alpaca"]),
        ("data.val_size=1.5", ["data.val_size is 1.5", "a share below 1, or a whole number of examples"]),
        ("out=5", ["out is 5", "a path; put it in quotes"]),
        ("out=null", ["out is null", "a path"]),
        ("memory.host_limit=5GX", ["memory.host_limit is '5GX'", "24GiB"]),
        ("memory.host_limit=0.1B", ["memory.host_limit is '0.1B'", "24GiB"]),
        ("train=3", ["train is 3 (whole number)", "section with keys", "micro_batch_size"]),
        ("train.steps", ["'train.steps'", "section.key=value"]),
        ("=3", ["'=3'", "section.key=value"]),
        ("a..b=3", ["'a..b=3'", "section.key=value"]),
        ("out=[", ["'out=['", "quote it"]),
        ("out=@x", ["'out=@x'", "quote it"]),
    ],
)
def test_bad_override_is_one_clear_sentence(override: str, parts: list[str]) -> None:
    message = problem_of(override)
    assert "\n" not in message
    for part in parts:
        assert part in message


def test_sources_are_complete() -> None:
    """What a source does not say is as `data` says; each entry of a dataset_info.json is a source."""
    config = config_of("data.path=[a, {path: b, weight: 2, format: kto}]", "data.format=text", "data.split=s")
    assert [(source.path, source.weight, source.format, source.split) for source in config.data.sources] == [
        ("a", None, "text", "s"),
        ("b", 2.0, "kto", "s"),
    ]
    assert build_config(yaml.safe_load(dump_config(config))) == config
    config = config_of("dataset_dir=d", "dataset=x,y", "data.eval_path={math: [m, {path: n}]}")
    assert [(source.path, source.dataset) for source in config.data.sources] == [("d", "x"), ("d", "y")]
    assert [source.path for source in config.data.eval_sources["math"]] == ["m", "n"]


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"train": {"stps": 1}, "optim": {"lr": "x"}, "data": {"path": []}}, source="run.yaml")
    lines = str(caught.value).split("\n")
    assert lines[0] == "run.yaml has 4 problems:"
    assert [re.split(" is | key |;", line)[-2 if "key" in line else 0] for line in lines[1:]] == [
        "  - model.path",
        "  - data.path",
        "train.stps",
        "  - optim.lr",
    ]


def test_of_many_problems_the_first_are_named(tmp_path: Path) -> None:
    path = write(tmp_path, f"model: {{path: m}}\ndata: {{path: d}}\nlog: {{webhook_on: {[0] * 300}}}\n")
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    problems = str(caught.value).splitlines()
    assert "problems:" in problems[0]
    assert len(problems) == 32
    assert re.fullmatch(r"  - and 27\d more", problems[-1])


def doubled(num_lines: int, *, times: int = 2) -> str:
    """Return lines of YAML, each a list of the one before, twice: the last one stands for 2^n values."""
    lines = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * times)}]" for n in range(1, num_lines)]
    return "\n".join(["a0: &a0 [x]", *lines])


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("model: {path: m}\nmodel: {path: n}\n", ["line 2", "the key model is given twice"]),
        ("optim:\n  lr: 1\n  eps: 1\n  lr: 2\n", ["line 4", "the key lr is given twice"]),
        ("model: [\n", ["line 2"]),
        ("1: x\n", ["line 1", "the key 1 is not text"]),
        ("{[1]: x}\n", ["line 1", "not text"]),
        ("- a\n", ["must have sections", "(list)"]),
        ("", ["must have sections", "null"]),
        ("model: !!python/object/apply:os.system ['true']\n", ["line 1", "python/object"]),
        (
            "model: {path: m}\nlearning_rate: 1\noptim: {lr: 2}\n",
            ["learning_rate and optim.lr both set optim.lr"],
        ),
        ("max_length: 5\nmax_seq_length: 6\n", ["max_length", "max_seq_length", "data.seq_len"]),
        ("model: \ud7ff\x07", ["special characters"]),
        ("model:\n  path: !!bool zz\n", ["line 2", "'zz' is no value of the type bool"]),
        ("model: !!timestamp 99\n", ["line 1", "'99' is no value of the type timestamp"]),
        ("model: !!float ''\n", ["line 1", "'' is no value of the type float"]),
        ("model: !!map [1]\n", ["line 1", "expected a mapping"]),
        ("model: &again [*again]\n", ["line 1", "recursive"]),
        ("out: " + "[" * 5000, ["line 1", "more than 64 deep"]),
        ("out: " + "{a: " * 3000, ["line 1", "more than 64 deep"]),
        ("train:\n  steps: 0x" + "f" * 4000, ["line 2", "'0xffff", "...' is no value of the type int"]),
        ("out: [" + "a," * 60_000, ["line 1", "more than 50,000 values"]),
        (doubled(30), ["line 16", "its aliases stand for", "more than 50,000 values"]),
        (doubled(100, times=1), ["line 65", "its aliases stand for", "more than 64 deep"]),
    ],
)
def test_bad_file_is_named_with_its_line(tmp_path: Path, text: str, parts: list[str]) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    for part in [str(path), *parts]:
        assert part in str(caught.value)


def test_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the configuration .*nothing\.yaml cannot be read \(No such file"):
        read_config(tmp_path / "nothing.yaml")
    with pytest.raises(ConfigError, match=r"the configuration .* cannot be read"):
        read_config(tmp_path)
    (tmp_path / "model.yaml").write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(ConfigError, match=r"model\.yaml is larger than 1 MiB, and no configuration is"):
        read_config(tmp_path / "model.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"out: caf\xe9\n")
    with pytest.raises(ConfigError, match=r"latin\.yaml is not UTF-8 text \(byte 8\)"):
        read_config(tmp_path / "latin.yaml")


def test_names_of_the_hugging_face_trainer_are_read(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "model_name_or_path: m\ndata: {path: d}\nlearning_rate: 1e-4\nper_device_train_batch_size: 4\n"
        "gradient_accumulation_steps: 8\nmax_steps: 20\nsave_steps: 5\nsave_total_limit: 3\nwarmup_steps: 2\n"
        "max_length: 256\nmax_grad_norm: 0\nlr_scheduler_type: linear\nweight_decay: 0.0\noutput_dir: here\n",
    )
    config = load_config(path)
    assert (config.optim.lr, config.train.micro_batch_size, config.train.grad_accumulation) == (1e-4, 4, 8)
    assert (config.train.steps, config.checkpoint.every, config.checkpoint.keep_last) == (20, 5, 3)
    assert (config.optim.warmup_steps, config.data.seq_len, config.optim.max_grad_norm) == (2, 256, None)
    assert (config.optim.schedule, config.optim.weight_decay, config.out) == ("linear", 0.0, "here")


def test_every_alias_names_a_key() -> None:
    assert set(ALIASES.values()) <= set(config_keys())


def test_override_by_alias_wins_over_the_file_and_conflicts_with_its_key() -> None:
    raw = {"model": {"path": "m"}, "data": {"path": "d"}, "optim": {"lr": 1.0}}
    assert build_config(apply_overrides(raw, ["learning_rate=0.5"])).optim.lr == 0.5
    assert raw["optim"] == {"lr": 1.0}
    with pytest.raises(ConfigError, match=r"optim\.lr is set twice .*learning_rate and as optim\.lr"):
        apply_overrides(raw, ["learning_rate=0.5", "optim.lr=0.5"])
    assert "did you mean optim.lr?" in problem_of("optim.learning_rate=1")


def test_settings_replace_those_of_the_command_line_by_whatever_name() -> None:
    given = ["file.yaml", "learning_rate=0.5", "parallel.shards=2", "bf16=true", "out=run"]
    replaced = replace_settings(given, {"optim.lr": "0.1", "parallel.shards": "4", "train.steps": "3"})
    assert replaced == [
        "file.yaml",
        "bf16=true",
        "out=run",
        "optim.lr=0.1",
        "parallel.shards=4",
        "train.steps=3",
    ]


def test_every_key_is_described_and_the_page_is_fresh() -> None:
    keys = config_keys()
    assert len(keys) > 55
    assert all(key.description.endswith(".") for key in keys.values())
    assert [name for name, key in keys.items() if key.default == "required"] == ["model.path", "data.path"]
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_page(), (
        "run: python -c 'from megatrain.config.page import write_configuration_page as write; write()'"
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["optim.updates=immediate"],
            r"updated before the norm .*; use optim\.updates=deferred, or optim\.max",
        ),
        (["memory.fragments=true", "memory.num_slots=1"], r"use memory\.num_slots=2 or more"),
        (["memory.lockstep=3", "train.grad_accumulation=2"], r"memory\.lockstep is 3, but a step has 2"),
    ],
)
def test_settings_that_exclude_each_other_are_refused(overrides: list[str], words: str) -> None:
    assert re.search(words, problem_of(*overrides))


def test_settings_that_seem_to_exclude_each_other_are_not() -> None:
    assert config_of("optim.updates=immediate", "optim.max_grad_norm=null").optim.updates == "immediate"
    assert config_of("memory.fragments=true", "memory.num_slots=2").memory.num_slots == 2
    assert config_of("memory.lockstep=2", "train.grad_accumulation=2").memory.lockstep == 2


@pytest.mark.parametrize(
    ("override", "key", "value"),
    [
        ("num_train_epochs=3", "train.epochs", 3.0),
        ("warmup_ratio=0.1", "optim.warmup_steps", 0.1),
        ("warmup_ratio=0", "optim.warmup_steps", 0),
        ("max_steps=-1", "train.steps", None),
        ("bf16=true", "train.precision", "bf16"),
        ("bf16=false", "train.precision", "fp32"),
        ("eval_strategy='no'", "eval.every", None),
        ("eval_strategy=epoch", "eval.every", "epoch"),
        ("eval_strategy=steps", "eval.every", "epoch"),
        ("report_to=tensorboard", "log.to", ("tensorboard",)),
        ("report_to=none", "log.to", ()),
        ("report_to=[wandb, mlflow]", "log.to", ("wandb", "mlflow")),
        ("optim=adamw_torch", "optim.lr", 5e-5),
        ("gradient_checkpointing=true", "memory.activations", "auto"),
        ("fp16=false", "train.precision", "auto"),
        ("save_strategy=steps", "checkpoint.every", "auto"),
        ("resume_from_checkpoint=true", "checkpoint.resume", "auto"),
        ("torch_compile=true", "train.compile", "on"),
    ],
)
def test_value_of_transformers_means_the_same_here(override: str, key: str, value: object) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(config_of(override), section), name) == value


def test_evaluation_by_the_names_of_transformers(caplog: pytest.LogCaptureFixture) -> None:
    names = [
        "eval_steps=20",
        "eval_strategy=steps",
        "load_best_model_at_end=true",
        "early_stopping_patience=3",
    ]
    with caplog.at_level("INFO", logger="megatrain"):
        config = config_of("data.val_size=0.1", *names, "metric_for_best_model=eval_val_loss")
    settings = config.eval
    assert (settings.every, settings.load_best, settings.patience, settings.metric) == (20, True, 3, "val")
    assert caplog.messages == [
        "names of transformers: eval_steps is eval.every, eval_strategy says nothing new, "
        "load_best_model_at_end is eval.load_best, early_stopping_patience is eval.patience, "
        "metric_for_best_model is eval.metric"
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["fp16=true"], "use train.precision=bf16"),
        (["optim=adafactor"], "megatrain trains with AdamW"),
        (["optim=[adamw]"], "megatrain trains with AdamW"),
        (["deepspeed=ds.json"], "megatrain streams the model's state itself"),
        (["adam_beta2=0.99"], r"optim\.betas=\[0\.9, 0\.999\]"),
        (["greater_is_better=true"], "lowest loss"),
        (
            ["num_train_epochs=2", "train.steps=3"],
            "train.steps and train.epochs are both given; keep one, and set the other to null",
        ),
        (["eval.patience=2"], "eval.patience is set, but nothing is held out"),
        (["eval.every=2"], "there is nothing to evaluate"),
        (["train.on_spike=skip", "optim.updates=immediate", "optim.max_grad_norm=null"], "on_spike=warn"),
        (["optim.warmup_steps=1.5"], "a whole number"),
        (["train.epoch=3"], "did you mean train.epochs"),
    ],
)
def test_what_cannot_be_done_here_is_refused_with_the_way_out(overrides: list[str], words: str) -> None:
    assert re.search(words, problem_of(*overrides))


def test_names_of_transformers_in_a_file(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m}\ndata: {path: d}\noptim: adamw_torch\nbf16: true\n")
    config = load_config(path)
    assert (config.train.precision, config.optim.lr) == ("bf16", 5e-5)
    with pytest.raises(ConfigError, match=r"bf16 and train\.precision both set"):
        load_config(write(tmp_path, "train: {precision: fp32}\nbf16: true\n"))
