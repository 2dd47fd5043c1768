"""Turn the state of every global random generator into plain JSON values and back, bit for bit.

Words and bytes travel as base64; nothing is pickled. The generators of accelerators are saved once torch uses
any; checkpoints of before there were others than CUDA's have them under `cuda`.
"""

from __future__ import annotations

import base64
import logging
import random
from collections.abc import Mapping
from typing import Any

from megatrain.errors import CheckpointError
from megatrain.hardware.accelerators import accelerator, device_module, random_state, set_random_state

logger = logging.getLogger(__name__)


def encode_rng() -> dict[str, Any]:
    """Return the states of `random`, numpy's global generator, torch on the CPU and on each accelerator."""
    import numpy as np
    import torch

    version, words, gauss = random.getstate()
    kind, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert kind == "MT19937", f"numpy's global generator is {kind}"
    own = accelerator()
    states = []
    if own is not None and device_module(own).is_initialized():
        count = torch.accelerator.device_count()
        states = [random_state(torch.device(own, index)) for index in range(count)]
    return {
        "python": {
            "version": version,
            "words": _encode(np.asarray(words, dtype="<u4").tobytes()),
            "gauss": gauss,
        },
        "numpy": {
            "words": _encode(np.asarray(keys, dtype="<u4").tobytes()),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "gauss": float(cached),
        },
        "torch": _encode(torch.get_rng_state().numpy().tobytes()),
        "accelerator": {"kind": own, "states": [_encode(state.numpy().tobytes()) for state in states]},
    }


def restore_rng(states: Mapping[str, Any]) -> None:
    """Put every generator into the state that `encode_rng` saw.

    States of accelerators that this machine lacks are left out with a warning: such a run goes on, not bit
    for bit.

    Raises:
        CheckpointError: The values are not those of `encode_rng`; no generator has changed.
    """
    import numpy as np
    import torch

    before = encode_rng()
    try:
        _restore(states, np, torch)
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        _restore(before, np, torch)
        raise CheckpointError(
            f"the checkpoint's random generator states are not usable ({error}); resume from another one"
        ) from error


def _restore(states: Mapping[str, Any], np: Any, torch: Any) -> None:
    python, numpy_state = states["python"], states["numpy"]
    words = np.frombuffer(_decode(python["words"]), dtype="<u4")
    random.setstate((python["version"], tuple(words.tolist()), python["gauss"]))
    keys = np.frombuffer(_decode(numpy_state["words"]), dtype="<u4").astype(np.uint32)
    gauss = (numpy_state["has_gauss"], numpy_state["gauss"])
    np.random.set_state(("MT19937", keys, numpy_state["position"], *gauss))
    torch.set_rng_state(torch.frombuffer(bytearray(_decode(states["torch"])), dtype=torch.uint8))
    _restore_accelerators(states, torch)


def _restore_accelerators(states: Mapping[str, Any], torch: Any) -> None:
    saved = states["accelerator"] if "accelerator" in states else {"kind": "cuda", "states": states["cuda"]}
    own = accelerator()
    num_devices = torch.accelerator.device_count() if own is not None and own == saved["kind"] else 0
    if len(saved["states"]) > num_devices:
        logger.warning(
            "the checkpoint has random states of %d %s devices, this machine has %d; from here on, results "
            "are not bitwise",
            len(saved["states"]),
            saved["kind"],
            num_devices,
        )
    for index, state in enumerate(saved["states"][:num_devices]):
        words = torch.frombuffer(bytearray(_decode(state)), dtype=torch.uint8)
        set_random_state(torch.device(saved["kind"], index), words)


def _encode(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _decode(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
