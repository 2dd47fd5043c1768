"""`megatrain eval` computes the loss of a run's model on data, as the run's own evaluations do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatrain.checkpoint.load import verify
from megatrain.config import build_config, combine_settings
from megatrain.config.decided import as_begun, smallest_micro_batches, with_step
from megatrain.config.sections.config import Config
from megatrain.errors import ConfigError
from megatrain.objective.registry import DEFAULT, OBJECTIVES
from megatrain.train.adapters import check_base
from megatrain.train.caller import NOBODY, Caller
from megatrain.train.engine import make_engine
from megatrain.train.evaluate.losses import Evaluation, evaluate
from megatrain.train.inputs import Packer, choose_tokenizer, is_on_cpu, read_model_config
from megatrain.train.outputs.export import newest_model
from megatrain.train.planning.allocation import plan_memory
from megatrain.train.planning.run_machine import ready_to_plan
from megatrain.train.preference.reference import reference_for
from megatrain.train.resume.state_commits import drives_apart
from megatrain.train.run_data import make_eval_sets


def evaluate_run(
    run: Path,
    data: Sequence[str],
    overrides: Sequence[str] = (),
    caller: Caller = NOBODY,
) -> list[Evaluation]:
    """Evaluate the newest model of a run on each file separately.

    Rows, micro-batches and precision are those of the run, so the loss equals that of its own evaluation of
    the file (`data.eval_path`) to the last digit. Nothing of the run is written.

    Args:
        run: The run directory.
        data: The files, directories or hub ids.
        overrides: The overrides of the run's settings, as `section.key=value`.
        caller: The folders that are kept between runs, and the functions that measure and show progress.

    Raises:
        CheckpointError: There is no run, or it has no whole checkpoint.
        ConfigError: The run's loss compares answers with the model before the run.
        MegatrainError: The data or the model cannot be read, or the model does not fit.
    """
    checkpoint = newest_model(run)
    meta = verify(checkpoint, digests=False).meta
    config = _config(run, meta, data, overrides)
    base = check_base(config, meta)
    source = str(checkpoint) if base is None else config.model.path
    model_config = read_model_config(config, source)
    caller.progress("reading and tokenising the data")
    tokenizer = choose_tokenizer(config, checkpoint, model_config)
    packer = Packer(config, tokenizer, model_config, caller.prepared, meta["data"].get("day"))
    packed = packer.evaluation(None)
    reference_for(config, [rows for rows, _ in packed.values()], None)
    (_, packing), *_ = packed.values()
    counted = ready_to_plan(config, source, model_config, packing, caller)
    with drives_apart(config) as apart:
        planned = plan_memory(apart, counted, caller.measure)
        caller.progress("loading the model")
        engine = make_engine(
            apart,
            apart.choice if planned is None else planned.plan.choice,
            source,
            adapter=None if base is None else checkpoint,
            vocab_size=model_config.get_text_config().vocab_size if config.model.new_tokens else None,
            planned_tokens=0 if planned is None else planned.plan.tokens_together,
        )
        try:
            caller.progress("evaluating")
            return evaluate(engine, make_eval_sets(apart, packed), most_batches=config.eval.batches)
        finally:
            engine.close(removes=True)


def _config(run: Path, meta: Mapping[str, Any], data: Sequence[str], overrides: Sequence[str]) -> Config:
    """Return the settings of the run, with the data as its only evaluation sets."""
    saved = meta["config"]
    if OBJECTIVES[loss := saved["train"].get("loss", DEFAULT.name)].has_reference:
        raise ConfigError(
            f"{run} was trained on judged answers (train.loss={loss}), whose loss needs the model that it "
            "began with; its own evaluations are in events.jsonl (data.eval_path)"
        )
    given: dict[str, Any] = {
        "data.eval_path": {name: [path] for name, path in zip(_names(data), data, strict=True)},
        "data.val_size": 0,
        "eval.metric": None,
    }
    if saved["data"].get("chat_template") is not None:
        given["data.chat_template"] = None  # the checkpoint's tokenizer has the template
    raw, source = combine_settings([str(run / "config.yaml"), *overrides], given)
    config = as_begun(build_config(raw, source=source), saved)
    return smallest_micro_batches(with_step(config, on_cpu=is_on_cpu(config), num_rows=None))


def _names(data: Sequence[str]) -> list[str]:
    """Return a name for each set: that of its file, numbered where two are equal."""
    names: list[str] = []
    for path in data:
        stem = Path(path).name.split(".")[0] or "eval"
        taken = sum(name.rpartition("-")[0] == stem or name == stem for name in names)
        names.append(f"{stem}-{taken + 1}" if taken else stem)
    return names
