"""Liger's Triton kernels in place of a model's norms, rotary embedding and gated MLP: the `gpu` extra.

They replace classes and functions in transformers' modeling modules for the whole process, so they are
applied before the model is built; parameters keep their names and shapes. The head and the loss are left to
megatrain: Liger's fused linear cross-entropy would read the head's weight past the engine, and its
cross-entropy replaces `torch.nn.functional.cross_entropy` for everyone and overwrites the logits it is given.
"""

from __future__ import annotations

import importlib.util
import logging

from megatrain.errors import ConfigError, warn_once

_log = logging.getLogger(__name__)


def uses_liger(setting: str, device_type: str) -> bool:
    """Read the `model.kernels` setting: `liger`, `torch`, or `auto`, which is torch's until it is measured.

    Raises:
        ConfigError: `liger` without the package, or on a device that Triton has no kernels for.
    """
    if setting != "liger":
        return False
    if device_type == "cpu":
        raise ConfigError("model.kernels is liger, whose kernels run on GPUs only; use model.kernels=torch")
    for package in ("liger_kernel", "triton"):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"model.kernels is liger, but {package} is not installed; run pip install liger-kernel "
                "triton, or use model.kernels=torch"
            )
    return True


def apply_liger(model_type: str) -> bool:
    """Replace the kernels of a model type; call it before the model is built.

    Returns:
        Whether Liger knows the model type; if not, nothing changes, and a warning says so once.
    """
    from liger_kernel.transformers import _apply_liger_kernel
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN

    if model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:
        warn_once(_log, f"Liger has no kernels for models of type {model_type}; they run with torch's own")
        return False
    # What else there is, Liger knows per type: rope=True is an error for some of them, such as glm4.
    _apply_liger_kernel(model_type, cross_entropy=False, fused_linear_cross_entropy=False)
    return True
