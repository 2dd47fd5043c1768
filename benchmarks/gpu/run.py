"""What a step of the suite runs with: its record on disk, its time limit, its device."""

from __future__ import annotations

import faulthandler
import gc
import json
import signal
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
_PLACES = [f"{place}/" for place in (sysconfig.get_path("purelib"), sysconfig.get_path("stdlib"), ROOT)]
"""Where files are on this machine alone; a folder comes before those around it."""

MATMUL_SIZE = 8192
"""Rows and columns of the product whose rate is the peak that figures are held against."""


class TimeLimitError(BaseException):
    """A step's time is over. No `Exception`: a loop that notes failures and goes on must not take it."""


class UnavailableError(Exception):
    """A step cannot run here, for a reason that is no failure: a package or a feature is not there."""


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file whole, or not at all; files that it names are named as on every machine."""
    text = json.dumps(values, indent=1)
    for place in _PLACES:
        text = text.replace(place, "")
    part = path.with_suffix(".part")
    part.write_text(text + "\n")
    part.replace(path)


class Record:
    """The result of one step, on disk after every change."""

    def __init__(self, path: Path) -> None:
        """Begin an empty result."""
        self.path = path
        self.values: dict[str, Any] = {"status": "running"}
        self.add()

    def add(self, **values: Any) -> None:
        """Add values, and write everything."""
        self.values.update(values)
        write_json(self.path, self.values)

    def append(self, key: str, row: dict[str, Any], *, shown: dict[str, Any] | None = None) -> None:
        """Add a row to a list, write everything, and show the row, or `shown` in its place."""
        print(json.dumps({self.path.stem: {key: row if shown is None else shown}}), flush=True)
        self.add(**{key: [*self.values.get(key, []), row]})


class Heard:
    """What an engine's lanes did from now on: its meter takes it from them, and passes it on."""

    def __init__(self, engine: Any) -> None:
        """Listen to the engine's meter."""
        self.spans: list[Any] = []
        self.waits: list[Any] = []
        self._meter = engine.meter
        self._meter.take()
        self._meter.on_record = self._hear

    def _hear(self, record: Any) -> None:
        self.spans += record.spans
        self.waits += record.waits

    def stop(self) -> None:
        """Hear what there is so far, and nothing more."""
        self._meter.take()
        self._meter.on_record = None


@contextmanager
def limited(seconds: float, stack: IO[str] | None = None) -> Iterator[float]:
    """Raise `TimeLimitError` in the main thread once the seconds are over; yields when that is.

    Where all threads are at that moment is written to `stack`. Python runs a signal's handler between two of
    its own instructions, so a call that hangs is not ended.
    """

    def stop(_: int, __: FrameType | None) -> None:
        if stack is not None:
            faulthandler.dump_traceback(stack)
        raise TimeLimitError(f"stopped after {seconds:.0f} s")

    held = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield time.monotonic() + seconds
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, held)


@contextmanager
def deterministic() -> Iterator[None]:
    """Choose kernels whose result does not depend on timing, and full fp32 products, until this ends.

    A later step of the same process must find the kernels that a run takes.
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    tf32 = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    asked = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(asked[0], warn_only=asked[1])
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = tf32


_device: list[str] = []
"""That `use_device` has named."""


def use_device(name: str) -> None:
    """Let this process compute on a device: `auto` is the accelerator that torch offers.

    Others are as in `megatrain.attach`, and `host`, the one of tests/host_device: it is made of host memory
    and has streams of its own, so that what is written for accelerators runs without one.
    """
    _device[:] = [name]


def device_of(is_dry: bool) -> Any:
    """Return the device of this process; if none was named, the CPU for a dry run, and else CUDA.

    Raises:
        ConfigError: It is not there.
    """
    import torch

    name = _device[0] if _device else "cpu" if is_dry else "cuda:0"
    return torch.device("cpu") if name == "cpu" else _accelerator(name)


def _accelerator(name: str) -> Any:
    from megatrain.errors import ConfigError
    from megatrain.hardware.accelerators import accelerator, check_accelerator

    if name == "host":
        from tests.host_device.device import register

        register()
    offered = accelerator() if name == "auto" else name
    if offered is None:
        raise ConfigError("torch sees no accelerator; use --device cpu or --device host, with tiny shapes")
    return check_accelerator(offered)


def compile_cheaply() -> None:
    """Let compiled layers run as they were traced: C++ kernels take half a minute to compile."""
    from megatrain.stream.forward.compiled import Compiler

    Compiler.__init__.__defaults__ = ("aot_eager",)


def synchronize(device: Any) -> None:
    """Wait for the device, if it is one that must be waited for."""
    import torch

    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def release(device: Any) -> None:
    """Give back what nobody refers to any more, on the host and on the device."""
    from megatrain.hardware.accelerators import give_back_memory, reset_peak_bytes

    gc.collect()
    if device.type != "cpu":
        give_back_memory(device)
        reset_peak_bytes(device)


def best_s(device: Any, run: Callable[[], object], repeats: int = 5) -> float:
    """Return the seconds of the fastest of some runs, after one that does not count."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        began = time.perf_counter()
        run()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])


def matmul_flops(is_dry: bool) -> float:
    """Measure the rate of one large bf16 product on random data, FLOP/s: the peak that a user can reach.

    Sixteen products a run, because a single short one is faster than the card can go on.
    """
    import torch

    device = device_of(is_dry)
    size, count = (256, 1) if is_dry else (MATMUL_SIZE, 16)
    dtype = torch.float32 if is_dry else torch.bfloat16
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(count):
            torch.mm(left, right, out=out)

    return 2 * count * size**3 / best_s(device, run, repeats=8)


def measured_peak(out: Path, is_dry: bool) -> float:
    """Return the matmul rate that the step `rates` has found in this directory, or measure it."""
    try:
        return float(json.loads((out / "rates.json").read_text())["matmul_flops"])
    except (OSError, KeyError, ValueError):
        return matmul_flops(is_dry)


def memory_of_process(name: str = "VmRSS") -> int:
    """Return a value of this process in bytes, as Linux counts it: `VmRSS`, or `VmHWM` for its peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


def reset_peak_of_process() -> None:
    """Let `VmHWM` begin anew, where the kernel allows it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return
