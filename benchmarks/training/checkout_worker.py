"""One checkout's side of `same_bits.py` and `step_cpu_time.py`: trains as stdin says, prints what came out.

It uses the megatrain on its path, and of that what the public names and the format of checkpoints give: one
worker serves checkouts whose insides differ. It imports nothing else of this repository.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import json
import resource
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)


def main() -> None:
    """Do `bits` or `cpu_time` with a checkout."""
    import megatrain

    checkout = Path(sys.argv[1]).resolve()
    if checkout not in Path(megatrain.__file__).resolve().parents:
        sys.exit(f"megatrain is {megatrain.__file__}, and not that of {checkout}")
    torch.set_num_threads(1)
    {"bits": report_bits, "cpu_time": report_cpu_time}[sys.argv[2]]()


def report_bits() -> None:
    """Make the runs of stdin, and print a JSON line for each."""
    for name, asked in json.load(sys.stdin).items():
        try:
            with tempfile.TemporaryDirectory() as directory:
                report = (run_command if "ranks" in asked else run)(asked, Path(directory))
        except Exception as error:
            report = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps({"name": name, **report}), flush=True)


def report_cpu_time() -> None:
    """Take the run of stdin's first line; print the CPU time of steps for each number that follows."""
    asked = json.loads(sys.stdin.readline())
    with tempfile.TemporaryDirectory() as directory:
        engine, optimizer = begin(make_model(asked["config"]), asked, Path(directory))
        first = 0
        for line in sys.stdin:
            steps = range(first, first := first + int(line))
            engine.sync()  # so that no update of the steps before counts
            before = cpu_seconds()
            for step in steps:
                train_step(engine, optimizer, asked, step)
            engine.sync()
            print((cpu_seconds() - before) / len(steps), flush=True)


def cpu_seconds() -> float:
    """Return the CPU time of all threads of this process so far, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def run(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train as asked; returns the digests of all that came out."""
    model = make_model(asked["config"])
    engine, optimizer = begin(model, asked, directory)
    found = {key: getattr(engine.choice, key) for key in field_names(type(engine.choice))}
    values: dict[str, str] = {}
    for step in range(asked["steps"]):
        loss, norm = train_step(engine, optimizer, asked, step)
        values[f"loss of step {step}"] = digest(loss)
        values[f"gradient norm of step {step}"] = struct.pack("<d", norm).hex()
    values |= {f"master {name}": digest(value) for name, value in engine.named_masters()}
    values |= state_digests(engine, directory / "state")
    engine.detach()
    values |= {f"weight {name}": digest(value) for name, value in model.named_parameters()}
    return {"values": values, "asked_but_not_so": list(not_as_asked(asked, found))}


def run_command(asked: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Train as asked by `megatrain train` on several ranks; returns the digests of all that came out.

    Raises:
        RuntimeError: The command has failed; the last line of what it says.
    """
    make_model(asked["config"]).save_pretrained(directory / "model")
    make_tokenizer().save_pretrained(directory / "model")
    write_data(directory)
    (directory / "config.yaml").write_text(json.dumps(asked["settings"]))  # JSON is YAML
    command = [sys.executable, "-W", "ignore", "-m", "megatrain", "train", "config.yaml"]
    command += ["--ranks", str(asked["ranks"])]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError((done.stderr.strip().splitlines() or ["it says nothing"])[-1])
    out = directory / asked["settings"]["out"]
    values: dict[str, str] = {}
    for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()):
        for name in ("loss", "grad_norm"):
            values[f"{name} of step {row['step']}"] = repr(row[name])
    for event in map(json.loads, (out / "events.jsonl").read_text().splitlines()):
        if event["event"] == "evaluation":
            values[f"evaluation after step {event['step']}"] = repr(event["loss"])
        if event["event"] == "start" and event["ranks"] != asked["ranks"]:
            raise RuntimeError(f"{event['ranks']} ranks have trained")
    newest = max((out / "checkpoints").glob("step-*"))
    for place in (newest, out / "hf"):
        for file in sorted(place.rglob("*.safetensors")):
            values |= {f"{place.name} {name}": digest(tensor) for name, tensor in load_file(file).items()}
    return {"values": values, "asked_but_not_so": list(not_as_planned(asked["settings"]["memory"], out))}


def not_as_planned(memory: dict[str, Any], out: Path) -> Iterator[str]:
    """Yield where a run has planned other memory than its settings ask for."""
    plan = json.loads((out / "plan.json").read_text())
    for name, have in plan["policy"]["memory"].items():
        if memory.get(name, have) != have:
            yield f"{name} is {have!r}, not {memory[name]!r}"
    if "tiers" in memory and not plan["bytes_per_step"]["drive_read"]:
        yield "no state is on drives"


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Make a tokenizer of bytes."""
    tokenizer = Tokenizer(models.BPE({char: n for n, char in enumerate(byte_characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


def byte_characters() -> list[str]:
    """Return the characters by which tokenizers write bytes, in a fixed order."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def write_data(directory: Path) -> None:
    """Write lines of text, and pairs of answers."""
    generator = torch.Generator().manual_seed(5)

    def words(count: int) -> str:
        letters = torch.randint(97, 123, (count, 4), generator=generator).tolist()
        return " ".join(map("".join, ([chr(letter) for letter in word] for word in letters)))

    (directory / "text.txt").write_text("".join(f"{words(40)}\n" for _ in range(60)))
    pairs = [{"prompt": words(3), "chosen": f" {words(6)}", "rejected": f" {words(4)}"} for _ in range(40)]
    (directory / "pairs.jsonl").write_text("".join(f"{json.dumps(pair)}\n" for pair in pairs))


def begin(model: PreTrainedModel, asked: dict[str, Any], directory: Path) -> tuple[Any, Any]:
    """Return the engine and the optimizer."""
    engine = attach(model, asked, directory)
    functions = [engine.adamw, *filter(None, [getattr(engine, "make_optimizer", None)])]
    return engine, engine.adamw(**supported(functions, asked["adamw"]))


def train_step(engine: Any, optimizer: Any, asked: dict[str, Any], step: int) -> tuple[Tensor, float]:
    """Take a step; returns its loss and the norm of its gradients."""
    number = asked["attach"]["num_micro_batches"]
    batches = make_batches(number, asked["rows"], asked["tokens"], seed=step)
    loss = engine.forward_backward(batches, seeds=[100 * step + n for n in range(number)])
    return loss, optimizer.step().grad_norm


def make_model(config: dict[str, Any]) -> PreTrainedModel:
    """Make a random model in training mode, its norms and biases moved off their defaults."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.02 * torch.randn(parameter.shape))
    return model.train()


def make_batches(number: int, rows: int, tokens: int, *, seed: int) -> list[dict[str, Tensor]]:
    """Make random micro-batches whose rows end in padding of different lengths."""
    generator = torch.Generator().manual_seed(1000 + seed)
    batches = []
    for _ in range(number):
        ids = torch.randint(3, 128, (rows, tokens), generator=generator)
        mask = torch.ones_like(ids)
        for row in range(rows):
            mask[row, tokens - 3 - 2 * row :] = 0
        ids = ids * mask
        batches.append({"input_ids": ids, "labels": ids.where(mask == 1, -100), "attention_mask": mask})
    return batches


_ALWAYS_BEFORE = {"outer_streams": False, "sums": "device", "mirror_resident": True}
"""What checkouts without a setting do."""


def attach(model: PreTrainedModel, asked: dict[str, Any], directory: Path) -> Any:
    """Attach with every setting given, wherever this checkout takes it.

    Raises:
        LookupError: The checkout has a setting that is not spelled out, or lacks one.
    """
    import megatrain

    choice_class, tiers_class = classes()
    settings = settings_of(asked)
    in_choice = field_names(choice_class)
    if unknown := in_choice - settings.keys():
        raise LookupError(f"Choice has {', '.join(sorted(unknown))}; spell it out in checkout_runs.py")
    accepted = inspect.signature(megatrain.attach).parameters
    keywords = {name: value for name, value in settings.items() if name not in in_choice}
    if "batch" in accepted:  # it has taken the place of a number
        number = keywords.pop("num_micro_batches")
        shape = {"micro_batch_size": asked["rows"], "seq_len": asked["tokens"], "num_micro_batches": number}
        keywords["batch"] = importlib.import_module(choice_class.__module__).StepBatch(**shape)
    for name, always in _ALWAYS_BEFORE.items():
        if name not in in_choice and settings[name] == always:
            del keywords[name]
    if lacking := keywords.keys() - accepted.keys():
        raise LookupError(f"neither Choice nor attach has {', '.join(sorted(lacking))}")
    choice = choice_class(**{name: settings[name] for name in in_choice})
    tiers = None
    if asked["drives"]:
        drives = tuple(directory / f"drive{number}" for number in range(asked["drives"]))
        keeps = asked["choice"]["updates"] != "immediate"
        tiers = tiers_class(nvme=drives, ram=asked["ram"], keeps_gradients=keeps)
    return megatrain.attach(model, choice=choice, tiers=tiers, **keywords)


def settings_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Return all settings but the optimizer's, with the types that they have in a `Choice`."""
    settings = {**asked["attach"], **asked["choice"]}
    settings["activations"] = tuple(settings["activations"])
    settings["tiers"] = frozenset(tuple(pair) for pair in settings["tiers"])
    return settings


def classes() -> tuple[type, type]:
    """Return this checkout's `Choice` and `Tiers`."""
    from megatrain.store.placement import Tiers

    homes = ("megatrain.config.choice", "megatrain.plan.choice")  # now, and before that folder held it
    home = next(home for home in homes if importlib.util.find_spec(home) is not None)
    return importlib.import_module(home).Choice, Tiers


def field_names(of: type) -> set[str]:
    """Return the names of a dataclass's fields."""
    return {field.name for field in fields(of)}


def supported(functions: Sequence[Any], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return the keywords that a function takes, or another to which it passes them on.

    A schedule that none of them takes is in the choice.
    """
    accepted = {name for function in functions for name in inspect.signature(function).parameters}
    return {name: value for name, value in keywords.items() if name in accepted}


def not_as_asked(asked: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """Yield where the engine's choice is not the one that was asked for."""
    for name, wanted in settings_of(asked).items():
        have = found.get(name, wanted)
        every = (wanted,) * len(have) if isinstance(have, tuple) and isinstance(wanted, str) else wanted
        if have != every:
            yield f"{name} is {have!r}, not {wanted!r}"


def state_digests(engine: Any, directory: Path) -> Iterator[tuple[str, str]]:
    """Yield (name, digest) of remainders, moments and scales, read from the files of a checkpoint."""
    from megatrain.train.resume.state import write_state

    directory.mkdir()
    write_state(engine, directory)
    for file in sorted(directory.rglob("*.safetensors")):
        yield from ((name, digest(tensor)) for name, tensor in load_file(file).items())


def digest(tensor: Tensor) -> str:
    """Return the SHA-256 of a tensor's type, shape and bytes."""
    plain = tensor.detach().contiguous()
    about = f"{plain.dtype} {tuple(plain.shape)} ".encode()
    return hashlib.sha256(about + plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


if __name__ == "__main__":
    main()
