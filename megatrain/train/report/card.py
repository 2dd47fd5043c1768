"""The model card of a run: `README.md` of `hf/`, in the format of the Hugging Face hub.

It is made to be shared: it holds only the last part of paths, and nothing of people and machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatrain.train.records.metrics import MUCH_PADDING, format_bytes, format_count, format_duration
from megatrain.train.report.collect import RunFiles, read_run
from megatrain.train.report.texts import model_name

_SETTINGS = ("train", "optim", "data", "lora", "memory")
"""The sections that bear on the result or on the speed."""


def model_card(path: Path, *, is_merged: bool = False) -> str:
    """Return the card of a run's model.

    Args:
        path: The run directory.
        is_merged: Whether the adapters that the run has trained are merged into the weights.

    Raises:
        OutputError: The path is no run directory, or cannot be read.
    """
    run = read_run(path)
    lines = [*_text(run, is_merged)]
    return f"---\n{_data(run, is_merged)}\n---\n\n" + "\n".join(lines) + "\n"


def _rank(run: RunFiles) -> int | None:
    """Return the rank of the trained adapters; None if the model itself was trained."""
    rank = run.config.get("lora", {}).get("r")
    return rank if isinstance(rank, int) else None


def _best_step(run: RunFiles) -> int | None:
    """Return the step of the model if that is the best and not the last one."""
    steps = [row["step"] for row in run.events if row["event"] == "best"]
    return steps[-1] if steps and run.config.get("eval", {}).get("load_best") else None


def _data(run: RunFiles, is_merged: bool) -> str:
    """Return the metadata, as YAML."""
    from huggingface_hub import ModelCardData

    model, is_on_hub = _model(run)
    card = ModelCardData(
        base_model=model if is_on_hub else None,
        library_name="transformers" if is_merged or _rank(run) is None else "peft",
        pipeline_tag="text-generation",
        tags=["megatrain"],
    )
    return str(card.to_yaml()).strip()


def _model(run: RunFiles) -> tuple[str, bool]:
    """Return the name of the base model, and whether it is a name of the hub."""
    return model_name(str(run.config.get("model", {}).get("path", "a model")))


def _text(run: RunFiles, is_merged: bool) -> Iterator[str]:
    model, _ = _model(run)
    section = run.config.get("model", {})
    is_random = section.get("init") == "random"
    yield f"# {run.name}"
    yield ""
    rank = _rank(run)
    adapters = (
        "" if rank is None else f"Adapters of rank {rank} (LoRA){', merged into the base' * is_merged}. "
    )
    start = "random weights, with the architecture of" if is_random else "the weights of"
    versions = run.environment.get("versions")
    version = versions.get("megatrain", "") if isinstance(versions, Mapping) else ""
    yield f"{adapters}Trained with megatrain {version} from {start} `{model}`."
    yield ""
    yield from _table("Training", ("what", ""), _training(run))
    yield from _table("Loss", ("data", "step", "loss", "perplexity"), _losses(run))
    yield from _table("Hardware", ("what", ""), _hardware(run))
    yield from _table("Plan and fact", ("what", "planned", "seen"), plan_and_fact(run))
    settings = [(f"`{key}`", f"`{value}`") for key, value in _settings(run)]
    yield from _table("Settings", ("key", "value"), settings)


def _training(run: RunFiles) -> Iterator[tuple[str, str]]:
    train, data = run.config.get("train", {}), run.config.get("data", {})
    paths = data.get("path") or []
    names = [Path(str(path)).name for path in ([paths] if isinstance(paths, (str, dict)) else paths)]
    yield "data", ", ".join(f"`{name}`" for name in names) or "-"
    best = _best_step(run)
    yield (
        "steps",
        f"{run.step:,}" + ("" if best is None else f"; the model is that of step {best:,}, the best"),
    )
    if run.rows:
        yield "tokens", f"{run.rows[-1].get('tokens') or 0:,}"
        if run.rows[-1].get("targets"):
            yield "of these trained on", f"{run.rows[-1]['targets']:,}"
    yield "tokens per sequence", str(data.get("seq_len"))
    scaling = run.config.get("model", {}).get("rope_scaling")
    if isinstance(scaling, Mapping):
        yield "rotary embeddings", ", ".join(f"{name} {value}" for name, value in scaling.items())
    yield "sequences per step", str(_sequences(train, data))
    yield "precision", str(train.get("precision"))


def _sequences(train: Mapping[str, Any], data: Mapping[str, Any]) -> int:
    """Return the sequences of a step; runs of older versions do not record the tokens of a step."""
    tokens, seq_len = train.get("tokens_per_step"), data.get("seq_len")
    if isinstance(tokens, int) and isinstance(seq_len, int):
        return tokens // seq_len
    return (train.get("micro_batch_size") or 1) * (train.get("grad_accumulation") or 1)


def _losses(run: RunFiles) -> Iterator[tuple[str, ...]]:
    if run.rows and run.last_loss is not None:
        first = run.rows[0]
        if isinstance(first.get("loss"), (int, float)):
            yield "training, first step", str(first["step"]), f"{first['loss']:.4f}", ""
        yield "training, mean of the last steps", str(run.step), f"{run.last_loss:.4f}", ""
    for name, rows in run.evaluations().items():
        of_model = [row for row in rows if row["step"] == _best_step(run)]
        last = (of_model or rows)[-1]
        perplexity = last.get("perplexity")
        shown = f"{perplexity:.4g}" if isinstance(perplexity, (int, float)) else ""
        yield f"{name}, held out", str(last["step"]), f"{last['loss']:.4f}", shown


def _hardware(run: RunFiles) -> Iterator[tuple[str, str]]:
    environment = run.environment
    yield "device", str(environment.get("gpu") or "CPU")
    if "cpus" in environment:
        yield "CPU cores", str(environment["cpus"])
    versions = environment.get("versions")
    if isinstance(versions, Mapping):
        yield (
            "software",
            ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions),
        )
    if run.rows:
        seconds = sum(run.numbers("seconds"))
        yield "time of the steps", format_duration(seconds)


def _filled(run: RunFiles) -> float:
    """Return the share of real data in the planned tokens, since steps are logged without padding."""
    tokens, batch = run.rows[-1].get("tokens"), run.plan.get("batch")
    planned = batch.get("tokens") if isinstance(batch, Mapping) else None
    if not (isinstance(tokens, int) and isinstance(planned, int) and planned and run.step):
        return 1.0
    share = tokens / (run.step * planned)
    return share if share < 1 - MUCH_PADDING else 1.0


def plan_and_fact(run: RunFiles) -> Iterator[tuple[str, str, str]]:
    """Yield planned and measured values as text."""
    plan = run.plan
    if not plan or not run.rows:
        return
    yield "time of a step", _seconds(plan.get("step_s")), _seconds(run.step_s)
    verdict = plan.get("verdict")
    if isinstance(verdict, Mapping):
        yield "verdict", str(verdict.get("text")), ""
    filled = _filled(run)
    without = "" if filled == 1 else " without padding"
    yield f"tokens/s{without}", f"{plan.get('tokens_per_s', 0) * filled:,.0f}", f"{run.tokens_per_s:,.0f}"
    yield "bound by", str(plan.get("bound")), str(run.rows[-1].get("bound") or "-")
    planned = plan.get("host_plane_bytes", 0)
    yield "state in host memory", format_bytes(planned), format_bytes(run.most("host_bytes"))
    device = sum(pool["nbytes"] for pool in plan.get("pools", ()) if pool["tier"] == "device")
    if device and run.most("device_bytes"):
        yield "device memory, peak", format_bytes(device), format_bytes(run.most("device_bytes"))
    params = plan.get("model", {}).get("num_params")
    if params:
        yield "parameters", format_count(params), ""


def _settings(run: RunFiles) -> Iterator[tuple[str, Any]]:
    for section in _SETTINGS:
        values = run.config.get(section)
        for key, value in values.items() if isinstance(values, Mapping) else ():
            if value is not None and not _is_path(value):
                yield f"{section}.{key}", value


def _is_path(value: object) -> bool:
    """Return whether a value holds paths, which describe a machine and not the model."""
    if isinstance(value, Mapping):
        return any(map(_is_path, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_path, value))
    return isinstance(value, str) and ("/" in value or "\\" in value)


def _table(title: str, head: tuple[str, ...], rows: Any) -> Iterator[str]:
    cells = [tuple(str(cell).replace("|", "\\|") for cell in row) for row in rows]
    if not cells:
        return
    yield from (f"## {title}", "", f"| {' | '.join(head)} |", "|" + "---|" * len(head))
    yield from (f"| {' | '.join(row)} |" for row in cells)
    yield ""


def _seconds(value: Any) -> str:
    return f"{value:.4g} s" if isinstance(value, (int, float)) else "-"
