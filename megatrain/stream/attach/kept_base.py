"""A base that is kept as its checkpoint stores it: what it is kept beside, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megatrain.config.adaptation import Adaptation
from megatrain.config.choice import Choice
from megatrain.errors import ConfigError, ModelError
from megatrain.layout.blocks import BlockLayout
from megatrain.model.weights.files import PlannedWeights
from megatrain.model.weights.kept import keep_as_stored
from megatrain.stream.job.job import Job

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_INSTEAD = "or use lora.base=dequantised"


def keep_base(
    model: PreTrainedModel, weights: PlannedWeights | None, adaptation: Adaptation, choice: Choice, job: Job
) -> None:
    """Have the frozen weights of a model kept as its checkpoint stores them.

    Args:
        model: The model without adapters, whose parameters have no memory yet.
        weights: Its weights, planned; None: it has none.
        adaptation: What is trained, beside which they are kept.
        choice: The choice, as far as it is decided.
        job: The job.

    Raises:
        ConfigError: Something excludes it, or nothing of the checkpoint can be kept so.
    """
    if adaptation.lora is None or weights is None:
        raise ConfigError(
            "lora.base is as_stored, but only a checkpoint's weights that adapters leave as they are can be "
            f"kept so; train adapters (lora.r) beside a model from files, {_INSTEAD}"
        )
    refuse_beside_codes(choice, job)
    keep_as_stored(model, weights.conversions, weights.path)


def refuse_beside_codes(choice: Choice, job: Job) -> None:
    """Refuse what is not built for weights that are kept in codes.

    Raises:
        ConfigError: State is on drives or on the device alone, or several ranks train.
    """
    if job.tiers is not None:
        raise ConfigError(
            "lora.base is as_stored, and codes are kept in RAM alone; leave memory.tiers.nvme out, "
            f"{_INSTEAD}"
        )
    if job.ranks.size > 1:
        raise ConfigError(
            f"lora.base is as_stored, which {job.ranks.size} ranks cannot share; train on one device, "
            f"{_INSTEAD}"
        )
    if not choice.given.get("mirror_resident", True):
        raise ConfigError(
            "lora.base is as_stored, and codes are at home in RAM; use memory.mirror_resident=auto "
            f"(mirror_resident=True), {_INSTEAD}"
        )


def require_loaded_for(layouts: Sequence[BlockLayout]) -> None:
    """Refuse to move weights that are kept in codes, from a model that was loaded for other settings.

    Raises:
        ModelError: There are such weights.
    """
    encoded = [entry.name for layout in layouts for entry in layout.encoded]
    if encoded:
        raise ModelError(
            f"{len(encoded)} weights, such as {encoded[0]}, are kept as stored (lora.base), in memory that "
            "megatrain.load has laid out for other settings; give it and attach the same precision and "
            "fragments, and freeze parameters after attach"
        )
