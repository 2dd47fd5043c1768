"""Files of LLaMA-Factory and axolotl become ours: numbers, their defaults, and what is left out is named."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.config import config_keys, load_config
from megatrain.config.aliases import trainer_of
from megatrain.config.foreign import axolotl, llamafactory, translation
from megatrain.config.foreign.importing import import_settings
from megatrain.config.foreign.translation import Translation
from megatrain.config.yaml12 import parse_yaml
from megatrain.errors import ConfigError

ROOT = Path(__file__).parents[3]

LF_FULL = """\
### model
model_name_or_path: some-lab/Some-8B
trust_remote_code: true
flash_attn: fa2

### method
stage: sft
do_train: true
finetuning_type: full
deepspeed: examples/deepspeed/ds_z3_config.json

### dataset
dataset: identity,alpaca_en_demo
template: llama3
cutoff_len: 4096
max_samples: 1000
mask_history: true
neat_packing: true
overwrite_cache: true
preprocessing_num_workers: 16

### output
output_dir: saves/some-8b/full
logging_steps: 10
save_steps: 500
plot_loss: true

### train
per_device_train_batch_size: 1
gradient_accumulation_steps: 2
learning_rate: 1.0e-5
num_train_epochs: 3.0
lr_scheduler_type: cosine
warmup_steps: 20
bf16: true
optim: paged_adamw_8bit
val_size: 0.1
eval_strategy: steps
eval_steps: 250
report_to: none
"""

LF_LORA = """\
model_name_or_path: some-lab/Some-8B
stage: pt
finetuning_type: lora
lora_rank: 16
lora_target: q_proj, v_proj
additional_target: embed_tokens,lm_head
add_tokens: <ask>, <answer>
resize_vocab: true
use_rslora: true
quantization_bit: 4
dataset: c4_demo, wiki_demo
dataset_dir: my/data
mix_strategy: interleave_under
interleave_probs: 0.75, 0.25
max_steps: 200
max_grad_norm: 0
fp16: true
"""

AX_FULL = """\
base_model: some-lab/Some-8B
model_type: LlamaForCausalLM
load_in_8bit: false
strict: false
datasets:
  - path: some/alpaca
    type: alpaca
  - path: my/chats.jsonl
    ds_type: json
    type: chat_template
    field_messages: conversations
    message_property_mappings: {role: from, content: value}
    roles_to_train: [assistant, user]
    shards: 4
dataset_prepared_path:
val_set_size: 0.05
output_dir: ./out
sequence_len: 8192
sample_packing: true
gradient_accumulation_steps: 8
micro_batch_size: 1
num_epochs: 1
optimizer: adamw_torch_fused
lr_scheduler: cosine
cosine_min_lr_ratio: 0.1
learning_rate: 2e-5
bf16: auto
fp16:
gradient_checkpointing: true
flash_attention: true
warmup_steps: 100
evals_per_epoch: 2
saves_per_epoch: 1
weight_decay: 0.0
wandb_project: mine
special_tokens:
  pad_token: <|end_of_text|>
"""

AX_QLORA = """\
base_model: some-lab/Some-8B
datasets:
  - path: some/set
    type: {field_instruction: question, field_output: answer}
sequence_len: 2048
adapter: qlora
load_in_4bit: true
lora_r: 32
lora_alpha: 16
lora_dropout: 0.05
lora_target_linear: true
lora_modules_to_save: [embed_tokens]
tokens: ["<ask>"]
micro_batch_size: 2
learning_rate: 0.0002
max_steps: 50
seed: 7
adam_beta2: 0.95
"""


def translated(text: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings by our keys, whether they are there already or not, and reasons by their keys."""
    theirs = parse_yaml(text, source="their.yaml")
    module = llamafactory if trainer_of(theirs) == "LLaMA-Factory" else axolotl
    made = Translation(theirs)
    module.translate(made)
    assert not made.theirs, "every key is looked at"
    return made.settings, {key: reason for key, _, reason in made.left_out}


def test_llamafactory_full() -> None:
    settings, left_out = translated(LF_FULL)
    assert settings == {
        "model.path": "some-lab/Some-8B",
        "model.attn_implementation": "flash_attention_2",
        "train.micro_batch_size": 1,
        "train.grad_accumulation": 2,
        "train.epochs": 3.0,
        "train.seed": 42,
        "train.precision": "bf16",
        "data.path": "data/dataset_info.json",
        "data.dataset": ["identity", "alpaca_en_demo"],
        "data.seq_len": 4096,
        "data.max_samples": 1000,
        "data.val_size": 0.1,
        "data.workers": 16,
        "data.train_on": "last",
        "data.chat_template": "llama3",
        "data.packing": "best_fit",
        "optim.lr": 1e-5,
        "optim.schedule": "cosine",
        "optim.warmup_steps": 20,
        "optim.weight_decay": 0.0,  # transformers' default, which is not ours
        "optim.betas": [0.9, 0.999],
        "optim.max_grad_norm": 1.0,
        "checkpoint.every": 500,
        "eval.every": 250,
        "log.every": 10,
        "out": "saves/some-8b/full",
    }
    assert left_out.keys() == {
        "trust_remote_code",
        "deepspeed",
        "overwrite_cache",
        "plot_loss",
        "optim",
    }
    assert "optim.state=int8" in left_out["optim"]
    assert "--gpus N" in left_out["deepspeed"]
    shown = (ROOT / "docs/importing.md").read_text(encoding="utf-8")
    assert f"left out: deepspeed: examples/deepspeed/ds_z3_config.json ({left_out['deepspeed']})" in shown


def test_llamafactory_lora_and_mixture() -> None:
    settings, left_out = translated(LF_LORA)
    registry = "my/data/dataset_info.json"
    expected = {
        "lora.r": 16,
        "lora.target_modules": ["q_proj", "v_proj"],
        "lora.modules_to_save": ["embed_tokens", "lm_head"],
        "lora.rslora": True,
        "model.new_tokens": ["<ask>", "<answer>"],
        "data.path": [
            {"path": registry, "dataset": "c4_demo", "weight": 0.75},
            {"path": registry, "dataset": "wiki_demo", "weight": 0.25},
        ],
        "data.mixture_ends": "first_exhausted",
        "data.packing": "join",
        "data.seq_len": 2048,
        "train.micro_batch_size": 8,
        "train.steps": 200,
        "train.precision": "bf16",
        "optim.schedule": "linear",
        "optim.max_grad_norm": None,
    }
    assert {key: settings[key] for key in expected} == expected
    assert "train.epochs" not in settings
    assert "lora.alpha" not in settings, "twice the rank, there as here"
    assert left_out.keys() == {"quantization_bit", "fp16", "resize_vocab"}


@pytest.mark.parametrize("text", [LF_FULL, AX_FULL])
def test_a_step_that_is_not_given_is_theirs_and_not_ours(text: str) -> None:
    sizes = ("per_device_train_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    kept = "\n".join(line for line in text.splitlines() if not line.startswith(sizes))
    settings, _ = translated(f"{kept}\n")
    theirs = 8 if text == LF_FULL else 1  # transformers' default, and axolotl's
    assert (settings["train.micro_batch_size"], settings["train.grad_accumulation"]) == (theirs, 1)


def test_warmup_as_a_share_of_the_steps() -> None:
    settings, _ = translated(LF_FULL.replace("warmup_steps: 20", "warmup_ratio: 0.1"))
    assert settings["optim.warmup_steps"] == 0.1


def test_axolotl_full() -> None:
    settings, left_out = translated(AX_FULL)
    assert settings == {
        "model.path": "some-lab/Some-8B",
        "model.attn_implementation": "flash_attention_2",
        "train.micro_batch_size": 1,
        "train.grad_accumulation": 8,
        "train.epochs": 1.0,
        "train.seed": 42,
        "train.precision": "bf16",
        "data.path": [
            {"path": "some/alpaca", "format": "alpaca"},
            {
                "path": "my/chats.jsonl",
                "format": "messages",
                "columns": {"messages": "conversations"},
                "tags": {"role_tag": "from", "content_tag": "value"},
            },
        ],
        "data.seq_len": 8192,
        "data.val_size": 0.05,
        "data.packing": "best_fit",
        "data.train_on": ["assistant", "user"],
        "optim.lr": 2e-5,
        "optim.schedule": "cosine_with_min_lr",
        "optim.schedule_args": {"min_lr_rate": 0.1},
        "optim.warmup_steps": 100,
        "optim.weight_decay": 0.0,
        "optim.betas": [0.9, 0.999],
        "optim.max_grad_norm": 1.0,
        "eval.every": "epoch/2",
        "checkpoint.every": "epoch",
        "log.to": ["wandb"],
        "out": "./out",
    }
    assert left_out.keys() == {
        "model_type",
        "datasets.type",
        "datasets.shards",
        "gradient_checkpointing",
        "wandb_project",
        "special_tokens",
    }
    assert "data.chat_template=alpaca writes Alpaca's" in left_out["datasets.type"]
    named, of_named = translated(f"{AX_FULL}chat_template: alpaca\n")
    assert named["data.chat_template"] == "alpaca"
    assert "datasets.type" not in of_named


@pytest.mark.parametrize(
    ("text", "more", "expected", "left_out"),
    [
        (LF_FULL, "template: qwen", {"data.chat_template": "qwen2.5"}, {}),
        (LF_FULL, "template: phi", {"data.chat_template": "phi3"}, {}),
        (
            LF_FULL,
            "template: yi",
            {"data.chat_template": None},
            {"template": "no template of that name here"},
        ),
        (LF_FULL, "stage: pt", {"data.chat_template": None}, {}),
        (LF_FULL, "save_strategy: epoch", {"checkpoint.every": "epoch"}, {}),
        (AX_FULL, "chat_template: phi_35", {"data.chat_template": "phi3"}, {}),
        (AX_FULL, "chat_template: tokenizer_default", {"data.chat_template": None}, {}),
        (AX_FULL, "chat_template: jamba", {"data.chat_template": None}, {"chat_template": "docs/data.md"}),
        (
            AX_FULL,
            "chat_template: jinja\nchat_template_jinja: my/chat.jinja",
            {"data.chat_template": "my/chat.jinja"},
            {},
        ),
        (
            AX_FULL,
            "chat_template_jinja: '{{ messages }}'",
            {"data.chat_template": None},
            {"chat_template_jinja": "write it to a file"},
        ),
        (
            AX_FULL,
            "loss_watchdog_threshold: 5.0\nloss_watchdog_patience: 3",
            {"train.on_spike": "stop"},
            {"loss_watchdog_threshold": "ends the run at a loss far above the last 64"},
        ),
        (AX_FULL, "saves_per_epoch: 4", {"checkpoint.every": "epoch/4"}, {}),
    ],
)
def test_templates_and_times_are_taken_over(
    text: str, more: str, expected: dict[str, Any], left_out: dict[str, str]
) -> None:
    names = tuple(line.partition(":")[0] for line in more.splitlines())
    kept = "\n".join(line for line in text.splitlines() if not line.startswith(names))
    settings, reasons = translated(f"{kept}\n{more}\n")
    assert {key: settings.get(key) for key in expected} == expected
    for key, part in left_out.items():
        assert part in reasons[key]
    assert set(reasons) & set(names) == set(left_out) & set(names)


def test_axolotl_qlora_becomes_lora_with_the_reason() -> None:
    settings, left_out = translated(AX_QLORA)
    expected = {
        "lora.r": 32,
        "lora.alpha": 16,
        "lora.dropout": 0.05,
        "lora.target_modules": ["all-linear"],
        "lora.modules_to_save": ["embed_tokens"],
        "model.new_tokens": ["<ask>"],
        "train.steps": 50,
        "train.seed": 7,
        "train.precision": "fp32",
        "optim.betas": [0.9, 0.95],
        "optim.lr": 2e-4,
        "data.packing": "pad",
        "data.path": [{"path": "some/set"}],
    }
    assert {key: settings[key] for key in expected} == expected
    assert left_out.keys() == {"adapter", "load_in_4bit", "datasets.type"}
    assert "2 bytes per parameter" in left_out["adapter"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (
            {"stage": "dpo", "pref_loss": "kto_pair"},
            "pref_loss is kto_pair; megatrain has sigmoid, hinge, ipo",
        ),
        ({"stage": "rm"}, "stage is rm; megatrain trains pt, sft, dpo and kto files"),
        ({"finetuning_type": "oft"}, "finetuning_type is oft"),
        ({"do_train": False}, "do_train is false"),
        ({"model_name_or_path": None, "nothing": 1}, "model.path is required"),
        ({"cutoff_len": 1}, "data.seq_len is 1"),
        ({"max_steps": "5"}, "train.steps is '5' (text)"),
        ({"max_steps": None, "num_train_epochs": [1]}, "num_train_epochs is [1], which LLaMA-Factory"),
        ({"dataset": 5}, "dataset is 5, which LLaMA-Factory does not take there"),
        ({"mix_strategy": "interleave_over", "interleave_probs": "0.3,x"}, "interleave_probs is '0.3,x'"),
        ({"flash_attn": ["fa2"]}, "flash_attn is ['fa2']"),
    ],
)
def test_file_that_cannot_be_obeyed_is_refused(change: dict[str, Any], part: str) -> None:
    theirs = {**parse_yaml(LF_FULL, source="x"), **change}
    with pytest.raises(ConfigError) as caught:
        import_settings(theirs, source="their.yaml")
    assert str(caught.value).startswith("their.yaml")
    assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "change", "settings", "left_out"),
    [
        (
            LF_FULL,
            {"stage": "dpo", "pref_beta": 0.2, "pref_loss": "hinge", "ref_model": "x", "pref_ftx": 0.5},
            {"train.loss": "dpo", "preference.beta": 0.2, "preference.loss_type": "hinge"},
            {"ref_model", "pref_ftx"},
        ),
        (
            LF_FULL,
            {"stage": "kto", "kto_rejected_weight": 1.5},
            {"train.loss": "kto", "preference.undesirable_weight": 1.5},
            set(),
        ),
        (
            AX_FULL,
            {"rl": "ipo", "rl_beta": 0.3, "sample_packing": True},
            {
                "train.loss": "dpo",
                "preference.beta": 0.3,
                "preference.loss_type": "ipo",
                "data.packing": "pad",
            },
            {"sample_packing"},
        ),
        (
            LF_FULL,
            {"stage": "dpo", "pref_beta": 0.2, "pref_loss": "orpo", "pref_ftx": 0.5},
            {"train.loss": "orpo", "preference.beta": 0.2},
            {"pref_ftx"},
        ),
        (
            AX_FULL,
            {"rl": "orpo", "orpo_alpha": 0.3},
            {"train.loss": "orpo", "preference.beta": 0.3},
            {"sample_packing"},
        ),
        (
            LF_FULL,
            {"stage": "dpo", "pref_loss": "simpo", "simpo_gamma": 0.7, "pref_ftx": 0.5},
            {"train.loss": "simpo", "preference.simpo_gamma": 0.7, "preference.sft_weight": 0.5},
            set(),
        ),
        (
            AX_FULL,
            {"rl": "simpo", "rl_beta": 2.0},
            {"train.loss": "simpo", "preference.beta": 2.0, "preference.sft_weight": 1.0},
            {"sample_packing"},
        ),
        (
            AX_FULL,
            {"rl": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.5},
            {"preference.simpo_gamma": 1.5, "preference.sft_weight": 0.0},
            {"sample_packing"},
        ),
    ],
)
def test_losses_of_judged_answers_are_taken_over(
    text: str, change: dict[str, Any], settings: dict[str, Any], left_out: set[str]
) -> None:
    plain = import_settings(parse_yaml(text, source="x"), source="x")
    found = import_settings({**parse_yaml(text, source="x"), **change}, source="x")
    made = {f"{section}.{name}": value for section in found.settings for name, value in _of(found, section)}
    assert {key: made[key] for key in settings} == settings
    new = set(found.left_out) - set(plain.left_out)
    assert {line.partition(":")[0] for line in new} - left_out <= {"packing", "neat_packing"}
    assert left_out <= {line.partition(":")[0] for line in new}


def _of(found: Any, section: str) -> list[tuple[str, Any]]:
    values = found.settings[section]
    return list(values.items()) if isinstance(values, dict) else []


def test_other_methods_of_axolotl_and_foreign_files_are_refused() -> None:
    with pytest.raises(ConfigError, match="rl is grpo; megatrain has dpo, ipo, kto"):
        import_settings({**parse_yaml(AX_FULL, source="x"), "rl": "grpo"}, source="x")
    with pytest.raises(ConfigError, match="of neither LLaMA-Factory"):
        import_settings({"model": {"path": "x"}}, source="x")


@pytest.mark.parametrize("text", [LF_FULL, LF_LORA, AX_FULL, AX_QLORA])
def test_what_is_printed_is_a_configuration_that_says_what_was_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    (tmp_path / "their.yaml").write_text(text)
    for words in (
        ["import", str(tmp_path / "their.yaml")],
        ["import", str(tmp_path / "their.yaml"), "--out", str(tmp_path / "ours.yaml")],
    ):
        with pytest.raises(SystemExit) as ended:
            main(words)
        assert not ended.value.code
    shown = capsys.readouterr().out
    assert shown.startswith((tmp_path / "ours.yaml").read_text())
    with pytest.raises(ConfigError, match=r"a file of \S+; make it ours by `megatrain import \S+their"):
        load_config(tmp_path / "their.yaml")
    config = load_config(tmp_path / "ours.yaml")
    settings, left_out = translated(text)
    assert config.optim.lr == settings.get("optim.lr", 5e-5)
    assert config.data.seq_len == settings["data.seq_len"]
    for key in left_out:
        assert f"#   {key}: " in shown
        assert f"left out: {key}: " in shown
    assert config.lora.r == settings.get("lora.r")
    with pytest.raises(SystemExit) as ended:
        main(["import", str(tmp_path / "their.yaml"), "--out", str(tmp_path / "ours.yaml")])
    assert ended.value.code == 2


def test_every_setting_that_can_come_out_is_one_of_ours() -> None:
    """Or a run would silently lack what the file asked for."""
    sources = [Path(str(module.__file__)).read_text() for module in (axolotl, llamafactory, translation)]
    sections = {key.partition(".")[0] for key in config_keys() if "." in key}
    named = set(re.findall(rf'"((?:{"|".join(sections)})\.[a-z_]+)"', "".join(sources)))
    assert len(named) > 35
    assert {key for key in named if key not in config_keys()} == set()
