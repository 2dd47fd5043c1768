"""Registers the test device with torch as `host`: a torch.device made of this computer's memory and threads.

Registering changes what `torch.accelerator` is for the whole process, so tests that use it run in a process
of their own.
"""

from __future__ import annotations

import atexit
import importlib.util
import sys
import types
from typing import Any

import torch
from torch import Tensor

from megatrain.hardware.accelerators import VENDORS, Vendor
from tests.host_device.build import NAME, build

TYPE = "host"


def register() -> types.ModuleType:
    """Make `torch.device("host")` known to torch, and return its module, `torch.host`."""
    if hasattr(torch, TYPE):
        return sys.modules[f"torch.{TYPE}"]
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    native = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(native)
    torch.utils.rename_privateuse1_backend(TYPE)
    module = _module(native)
    VENDORS[TYPE] = Vendor(title="test", lock=native.lock, unlock=native.unlock, has_compiler=False)
    sys.modules[module.__name__] = module
    torch._register_device_module(TYPE, module)
    torch.utils.generate_methods_for_privateuse1_backend()
    atexit.register(_end, native)  # a stream that still works when the process goes down would crash it
    return module


def _end(native: Any) -> None:
    native.delay(0, 0.0, 0.0, 0.0)
    for index in range(native.device_count()):
        try:
            native.synchronize(index)
        except RuntimeError as error:
            print(error, file=sys.stderr)


def _module(native: Any) -> types.ModuleType:
    """Make the device's module, with what torch and the vendor table look for in one."""

    def index_of(device: Any = None) -> int:
        if isinstance(device, int):
            return device
        index: int | None = None if device is None else torch.device(device).index
        return int(native.current_device()) if index is None else index

    def generator(device: Any = None) -> torch.Generator:
        made: torch.Generator = native.generator(index_of(device))
        return made

    def manual_seed_all(seed: int) -> None:
        for index in range(native.device_count()):
            native.generator(index).manual_seed(seed)

    def set_rng_state(state: Tensor, device: Any = None) -> None:
        generator(device).set_state(state)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        index = index_of(device)
        return native.limit(index) - native.in_use(index), native.limit(index)

    class Device:
        """Context in which a device is the current one."""

        def __init__(self, device: Any) -> None:
            self._index = index_of(device)

        def __enter__(self) -> None:
            self._before = native.current_device()
            native.set_device(self._index)

        def __exit__(self, *_: object) -> None:
            native.set_device(self._before)

    module = types.ModuleType(f"torch.{TYPE}")
    names: dict[str, Any] = {
        "native": native,
        "_initialized": True,
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "is_initialized": lambda: True,
        "is_available": lambda: True,
        "device_count": native.device_count,
        "current_device": native.current_device,
        "set_device": lambda device: native.set_device(index_of(device)),
        "device": Device,
        "synchronize": lambda device=None: native.synchronize(index_of(device)),
        "default_generators": tuple(native.generator(index) for index in range(native.device_count())),
        "manual_seed": lambda seed: generator().manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generator(device).get_state(),
        "set_rng_state": set_rng_state,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
        "get_device_name": lambda device=None: "host memory",
        "mem_get_info": mem_get_info,
        "max_memory_allocated": lambda device=None: native.peak(index_of(device)),
        "memory_allocated": lambda device=None: native.in_use(index_of(device)),
        "reset_peak_memory_stats": lambda device=None: native.reset_peak(index_of(device)),
        "memory_stats": lambda device=None: {
            "num_alloc_retries": module.num_alloc_retries,
            "reserved_bytes.all.current": native.peak(index_of(device)),
            "allocated_bytes.all.current": native.in_use(index_of(device)),
        },
        "num_alloc_retries": 0,
        "empty_cache": lambda: None,
    }
    for name, value in names.items():
        setattr(module, name, value)
    return module
