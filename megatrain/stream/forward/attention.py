"""Which kernels a model runs with: torch's for attention, in which order, and whether results repeat.

torch's own order puts cuDNN last. On Hopper cuDNN is the fastest (a backward at 516 TF/s where flash has
322), and data center Blackwell is taken to be alike; elsewhere it is slower (0.82 of flash on A100, 0.88 on
RTX PRO 6000), so the order is changed there and nowhere else. A mask, a head size or a dtype that a kernel
cannot do still makes torch take the next one.

The order is a setting of the process, not of a thread: it holds in the backward too, which CUDA runs on a
thread of autograd's. So it is set when an engine is attached, and put back when it is detached.

Where results are to repeat, cuDNN is left out, whose backward has no deterministic form that torch knows of;
flash and memory-efficient attention have one, which torch takes then, and math needs none.

The flash-attn package is not chosen here: torch has its kernel, and a user who wants the package's other
kernels names them in `model.attn_implementation`.

Sources: FlashAttention-3 (Shah et al., 2024), table of backward passes; transformers issue 48163.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatrain.hardware.accelerators import vendor_of
from megatrain.hardware.determinism import deterministic, in_full
from megatrain.model.documents.able import require_able
from megatrain.model.documents.begins import documents_known
from megatrain.model.masks import long_masks_refused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_PREFERS_CUDNN = (9, 10)
"""Major compute capabilities: Hopper, and data center Blackwell. Workstation Blackwell is 12."""

_CUDNN_FIRST = (
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)

_REPEATABLE = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)


def choose_attention(
    capability: tuple[int, int] | None, *, repeats: bool = False
) -> tuple[SDPBackend, ...] | None:
    """Choose the order in which torch tries attention kernels; None: torch's own order.

    Args:
        capability: Compute capability of a device of NVIDIA's, such as (9, 0); None of others.
        repeats: Leave out a kernel that may give other bits in each run.
    """
    if capability is not None and repeats:
        return _REPEATABLE
    if capability is None or capability[0] not in _PREFERS_CUDNN:
        return None
    return _CUDNN_FIRST


def attention_of(device: torch.device, *, repeats: bool = False) -> tuple[SDPBackend, ...] | None:
    """Choose the order for a device of this machine, as `choose_attention`."""
    if device.type == "cpu":
        return None
    return choose_attention(vendor_of(device).capability(device), repeats=repeats)


def prefers_cudnn(device: torch.device) -> bool:
    """Return whether cuDNN attends on a device, which makes a plan for each shape, where it can."""
    return attention_of(device) == _CUDNN_FIRST


@contextmanager
def attention_order(order: Sequence[SDPBackend] | None) -> Iterator[None]:
    """Let torch try attention kernels in this order, in every thread; kernels that are off stay off."""
    if order is None:
        yield
        return
    is_on = {
        SDPBackend.CUDNN_ATTENTION: torch.backends.cuda.cudnn_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: torch.backends.cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: torch.backends.cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: torch.backends.cuda.math_sdp_enabled(),
    }
    with sdpa_kernel([backend for backend in order if is_on[backend]], set_priority=True):
        yield


@contextmanager
def repeating(model: PreTrainedModel, device: torch.device) -> Iterator[None]:
    """Let every operation give the same bits in every run for a while, or raise, with a model attached.

    Raises:
        ConfigError: The model attends, or the environment is set, in a way that does not repeat.
    """
    require_able(model, device, repeats=True)
    with deterministic(device), attention_order(attention_of(device, repeats=True)):
        yield


@contextmanager
def chosen_kernels(model: PreTrainedModel, device: torch.device, *, repeats: bool) -> Iterator[None]:
    """Hold what the process is set to while a model is attached.

    Args:
        model: The model, which makes no long attention mask meanwhile, and reads no positions back from the
            device for one.
        device: The device on which the model computes.
        repeats: A claim that every operation gives the same bits in every run, or raises.

    Raises:
        ConfigError: The model is to attend in a way that the device cannot.
    """
    require_able(model, device, repeats=repeats)
    with ExitStack() as settings:
        settings.enter_context(long_masks_refused(model))
        settings.enter_context(documents_known())
        settings.enter_context(in_full(device))
        if repeats:
            settings.enter_context(deterministic(device))
        settings.enter_context(attention_order(attention_of(device, repeats=repeats)))
        yield
