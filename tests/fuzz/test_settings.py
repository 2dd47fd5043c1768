"""Settings of any text, and of any values, are read or refused in a sentence, quickly."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from megatrain.config.reading import build_config, combine_settings, read_config
from megatrain.config.sections.config import Config
from megatrain.config.yaml12 import dump_yaml, parse_yaml
from megatrain.errors import ConfigError
from tests.fuzz.judge import attack, counts
from tests.fuzz.mutators import mutated_bytes, mutated_value, odd_value

_TOKENS = (
    *(
        "a",
        "b",
        "model",
        "path",
        "1",
        "0x1f",
        "1e-3",
        "~",
        "no",
        "null",
        "2001-01-01",
        ".nan",
        "'",
        '"',
        "|",
        ">",
    ),
    *(
        ":",
        ": ",
        "- ",
        "-",
        "?",
        "? ",
        "[",
        "]",
        "{",
        "}",
        ",",
        "#",
        "&a",
        "*a",
        "&b",
        "*b",
        "<<: *a",
        "<<",
        "%",
    ),
    *(
        "\n",
        "\n",
        "\n  ",
        "\n    ",
        " ",
        "\t",
        "---\n",
        "...\n",
        "!!int",
        "!!bool",
        "!!timestamp",
        "!!binary",
    ),
    *(
        "!!set",
        "!!omap",
        "!!pairs",
        "!!seq",
        "!!map",
        "!!str",
        "!!null",
        "!!float",
        "!!merge",
        "!x",
        "!",
        "=",
        "@",
    ),
    *(
        "!!python/object/apply:os.system",
        "!!python/name:os.system",
        "\\x",
        "\0",
        "\x85",
        "\u2028",
        "\ufeff",
        "é",
    ),
)
_DEEP = (
    "[" * 5000,
    "{a: " * 3000,
    "- " * 5000,
    "? " * 5000,
    "a: &a [*a, *a]\n" * 40,
    "9" * 10_000,
    "!" * 5000,
)


def yaml_text(random: Random) -> str:
    """Return some words and marks of YAML in any order, few of which are YAML."""
    if random.random() < 0.01:
        return random.choice(_DEEP)
    return "".join(random.choice(_TOKENS) for _ in range(1 + int(random.expovariate(0.08))))


def read_text(random: Random) -> None:
    values = parse_yaml(yaml_text(random), source="FILE")
    if isinstance(values, dict):
        build_config(values)


@counts(sample=3000, soak=150_000)
def test_any_yaml_is_read_or_refused(tmp_path: Path, num: int) -> None:
    assert attack(num, read_text, tmp_path) > num // 2


SETTINGS: dict[str, Any] = {
    "model": {"path": "m", "new_tokens": ["<a>"], "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "data": {"path": [{"path": "a.jsonl", "weight": 2, "columns": {"text": "t"}}, "b.txt"], "seq_len": 128},
    "train": {"steps": 10, "micro_batch_size": 2, "precision": "bf16", "loss": "sft"},
    "optim": {"lr": 1e-4, "betas": [0.9, 0.95], "warmup_steps": 3},
    "memory": {"activations": "auto", "drives": ["/tmp/x"], "host_limit": "10 GiB"},
    "lora": {"rank": 8, "targets": ["q_proj"]},
    "eval": {"every": 5, "prompts": ["hello"]},
    "checkpoint": {"every": 5, "keep_last": 2},
    "log": {"webhook": "http://a/b", "to": ["tensorboard"]},
    "parallel": {"shards": 2},
    "out": "run",
    "learning_rate": 1e-5,
}


def read_values(random: Random) -> None:
    values = mutated_value(random, SETTINGS)
    if isinstance(values, dict) and all(isinstance(key, str) for key in values):
        build_config(values)


@counts(sample=700, soak=100_000)
def test_settings_of_any_values_are_read_or_refused(tmp_path: Path, num: int) -> None:
    assert attack(num, read_values, tmp_path) > num // 2


def read_file(folder: Path, whole: bytes, random: Random) -> None:
    (folder / "run.yaml").write_bytes(mutated_bytes(random, whole))
    build_config(read_config(folder / "run.yaml"))


@counts(sample=600, soak=30_000)
def test_a_damaged_file_of_settings_is_read_or_refused(tmp_path: Path, num: int) -> None:
    whole = dump_yaml({"out": "run", "model": {"path": "m"}, **SETTINGS}).encode()
    assert attack(num, partial(read_file, tmp_path, whole), tmp_path) > num // 4


KEYS = [
    f"{section}.{key}"
    for section, field in Config.model_fields.items()
    for key in getattr(field.annotation, "model_fields", {})
]
ALIASES = [
    "learning_rate",
    "fp16",
    "deepspeed",
    "optim",
    "save_strategy",
    "max_length",
    "report_to",
    "lr_scheduler_type",
]


def read_overrides(random: Random) -> None:
    arguments = []
    for _ in range(1 + random.randrange(4)):
        key = random.choice(random.choice((KEYS, ALIASES)))
        try:
            text = dump_yaml(odd_value(random), flow=True) if random.random() < 0.5 else yaml_text(random)
        except (ValueError, RecursionError):  # no number that Python prints
            continue
        arguments.append(f"{key}={text}")
    raw, source = combine_settings(arguments, {"model.path": "m", "data.path": "d", "out": "o"})
    build_config(raw, source=source or "arguments")


@counts(sample=800, soak=70_000)
def test_any_override_is_read_or_refused(tmp_path: Path, num: int) -> None:
    assert len(KEYS) > 80
    assert issubclass(ConfigError, Exception)
    assert attack(num, read_overrides, tmp_path) > num // 2
