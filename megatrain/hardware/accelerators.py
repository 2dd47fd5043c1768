"""Accelerators that blocks can run on: a table by vendor of the little that torch has no general name for.

Everything else goes through `torch.Stream`, `torch.Event`, `torch.accelerator`, and the functions that the
modules of all vendors have under the same names. Nothing outside this file asks for a vendor by name, but for
what looks at the hardware itself (`doctor`, sensors). None of the rows has run on its device yet.
"""

from __future__ import annotations

import importlib.util
import logging
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.errors import ConfigError

if TYPE_CHECKING:
    import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Vendor:
    """The properties by which accelerators differ."""

    title: str
    """The name in messages."""
    lock: Callable[[int, int], bool] | None = None
    """Page-locks so many bytes from an address, for copies that the host need not wait for; False where that
    is refused. None: torch has no way to, and copies of the state go through page-locked buffers."""
    unlock: Callable[[int], object] | None = None
    """Undoes `lock`, by the address."""
    has_compiler: bool = True
    """Whether torch compiles for it by default."""
    capability: Callable[[torch.device], tuple[int, int] | None] = lambda device: None
    """NVIDIA's compute capability, by which the order of attention kernels is chosen; None elsewhere."""
    environment: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Variables that libraries of the vendor read when they start, with the values at which their results are
    the same in every run; the first is set where there is none."""
    for_runs: Mapping[str, str] = field(default_factory=dict)
    """Variables that they read too, with the values at which runs fit and overlap best."""
    in_full: Callable[[], AbstractContextManager[object]] = nullcontext
    """Keeps products of fp32 from being computed in fewer bits."""
    repeats: Callable[[], AbstractContextManager[object]] = nullcontext
    """Holds what torch's own switch for deterministic algorithms leaves open."""
    collectives: str | None = None
    """Backend of torch.distributed that sends tensors from device to device; None: they pass through the
    host."""
    reach_each_other: Callable[[int], bool] = lambda count: False
    """Whether each of the first `count` devices can copy from the memory of every other one."""
    identity: Callable[[int], str] = str
    """Returns what tells a device from all others of the computer, by its index in this process."""
    triton: Mapping[str, bool] | None = None
    """Options of Triton's compiler with which kernels compute as IEEE says; None: none of ours run there."""


def _cuda_lock(address: int, nbytes: int) -> bool:
    import torch

    if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)) == 0:
        return True
    with suppress(RuntimeError):
        # The refused call stays the driver's last error, which the next kernel would raise as its own.
        torch.zeros(1, device="cuda")
    return False


def _cuda_unlock(address: int) -> None:
    import torch

    torch.cuda.cudart().cudaHostUnregister(address)


def _cuda_capability(device: torch.device) -> tuple[int, int] | None:
    import torch

    return None if torch.version.hip is not None else torch.cuda.get_device_capability(device)


def _cuda_reach_each_other(count: int) -> bool:
    import torch

    pairs = permutations(range(count), 2)
    return count <= torch.cuda.device_count() and all(
        torch.cuda.can_device_access_peer(*pair) for pair in pairs
    )


def _cuda_identity(index: int) -> str:
    import torch

    return str(torch.cuda.get_device_properties(index).uuid)


@contextmanager
def _cuda_repeats() -> Iterator[None]:
    """Let cuDNN choose a convolution by its shape, and not by which of them was the fastest just now."""
    import torch

    held, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, False
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = held


@contextmanager
def _cuda_in_full() -> Iterator[None]:
    """Turn TF32 off, which rounds the factors of fp32 products to 10 bits.

    torch has two sets of names for it, and refuses to read the older one where they differ; its own compiler
    and its flags of cuDNN read that one. So both are set, and both are given back.
    """
    import torch

    products: Any = torch.backends.cuda.matmul
    of_cudnn: Any = torch.backends.cudnn
    kernels: list[Any] = [products, of_cudnn.conv, of_cudnn.rnn]
    libraries: list[Any] = [products, of_cudnn]
    held = [kernel.fp32_precision for kernel in kernels]
    if "tf32" not in held:
        yield
        return
    allowed = [_allows_tf32(library) for library in libraries]
    for library in libraries:
        library.allow_tf32 = False
    for kernel in kernels:
        kernel.fp32_precision = "ieee"
    try:
        yield
    finally:
        for library, was_allowed in zip(libraries, allowed, strict=True):
            if was_allowed is not None:
                library.allow_tf32 = was_allowed
        for kernel, precision in zip(kernels, held, strict=True):
            kernel.fp32_precision = precision


def _allows_tf32(library: Any) -> bool | None:
    """Return the older switch of a library; None where torch refuses to read it."""
    try:
        return bool(library.allow_tf32)
    except RuntimeError:
        return None


VENDORS: dict[str, Vendor] = {
    "cuda": Vendor(
        title="CUDA",
        lock=_cuda_lock,
        unlock=_cuda_unlock,
        capability=_cuda_capability,
        environment={
            # cuBLAS: workspaces of fixed sizes; torch refuses products without one of these
            "CUBLAS_WORKSPACE_CONFIG": (":4096:8", ":16:8"),
            # transformers: what it asks of the flash-attn package
            "FLASH_ATTENTION_DETERMINISTIC": ("1",),
        },
        for_runs={
            # torch: what other rows leave free is used, whatever their length
            "PYTORCH_ALLOC_CONF": "expandable_segments:True",
            # the driver: a hardware queue for each lane's stream; 8 serve more streams than that in turn
            "CUDA_DEVICE_MAX_CONNECTIONS": "32",
        },
        in_full=_cuda_in_full,
        repeats=_cuda_repeats,
        collectives="nccl",
        reach_each_other=_cuda_reach_each_other,
        identity=_cuda_identity,
        triton={"enable_fp_fusion": False},
    ),
    "xpu": Vendor(title="XPU", collectives="xccl"),
}
"""The vendors, by torch's name for the kind of device. ROCm calls itself `cuda`. Tests add their own."""


def accelerator() -> str | None:
    """Return the kind of accelerator that torch offers and the table has; None: there is none."""
    import torch

    offered = torch.accelerator.current_accelerator(check_available=True)
    if offered is None:
        return None
    if offered.type not in VENDORS:
        _log.warning("torch offers %s, on which megatrain cannot run: device=cpu", offered.type)
        return None
    return offered.type


def check_accelerator(name: str) -> torch.device:
    """Return the device that a name like `cuda` or `cuda:1` stands for; the current one without a number.

    Raises:
        ConfigError: The device is not in the table, or not in this computer.
    """
    import torch

    kind, _, index = name.partition(":")
    if kind not in VENDORS:
        raise ConfigError(f"device is {name!r}, on which megatrain cannot run; use {_listed()}")
    offered = torch.accelerator.current_accelerator(check_available=True)
    if offered is None or offered.type != kind:
        title = VENDORS[kind].title
        raise ConfigError(f"device is {name!r}, but torch sees no {title} device; use device=cpu, or auto")
    count = torch.accelerator.device_count()
    if not index:
        return torch.device(kind, torch.accelerator.current_device_index())
    if not index.isdigit() or int(index) >= count:
        raise ConfigError(f"device is {name!r}, but devices here are {kind}:0 to {kind}:{count - 1}")
    return torch.device(kind, int(index))


def rank_kind(name: str) -> str | None:
    """Return the kind of accelerator of which each of several processes has one; None: they run on the CPU.

    Args:
        name: The device's name, as in `check_accelerator`, or `auto`; others are the CPU's.

    Raises:
        ConfigError: The name is that of one accelerator, by its number.
    """
    kind, _, index = name.partition(":")
    kind = (accelerator() or "cpu") if kind == "auto" else kind
    if kind in VENDORS and index:
        raise ConfigError(
            f"train.device is {name}, but each rank has a device of its own; use train.device={kind}"
        )
    return kind if kind in VENDORS else None


def check_count(name: str, count: int) -> str | None:
    """Refuse more processes than there are accelerators for them, one each; return `rank_kind`.

    Args:
        name: The device's name, as in `rank_kind`.
        count: The number of processes on this computer, all of which see what this one does.

    Raises:
        ConfigError: There are fewer, or one of them is named.
    """
    kind = rank_kind(name)
    if kind is not None:
        own_index(kind, [identities(kind)] * count, 0)
    return kind


def identities(kind: str) -> list[str]:
    """Return what tells each accelerator that this process sees from all others of this computer."""
    import torch

    return [VENDORS[kind].identity(index) for index in range(torch.accelerator.device_count())]


def own_index(kind: str, seen: Sequence[Sequence[str]], place: int) -> int:
    """Return which accelerator one of several processes of a computer has for itself.

    Where all see the same ones they take them in turn, and where a scheduler has given each process its own,
    each takes the first that it sees.

    Args:
        kind: The kind of the accelerators.
        seen: The `identities` of the accelerators that each process sees, by process.
        place: The process's place among those of the computer.

    Raises:
        ConfigError: There are too few, or two processes were given the same one.
    """
    title = VENDORS[kind].title
    if all(list(one) == list(seen[0]) for one in seen):
        if len(seen) > len(seen[0]):
            raise ConfigError(
                f"{len(seen)} ranks want one {title} device each, and there are {len(seen[0])}; use fewer, "
                "or train.device=cpu"
            )
        return place
    way_out = "give each rank one of its own, or all of them to every rank"
    for number, own in enumerate(seen):
        if not own:
            raise ConfigError(f"local rank {number} was given no {title} device; {way_out}")
        twin = next((other for other in range(number) if seen[other][0] == own[0]), None)
        if twin is not None:
            raise ConfigError(
                f"local ranks {twin} and {number} were given the same {title} device ({own[0]}); {way_out}"
            )
    return 0


def _listed() -> str:
    kinds = ", ".join(f"{kind}, {kind}:N" for kind in VENDORS)
    return f"auto, cpu, {kinds}, emulated, emulated:FILE or checked"


def vendor_of(device: torch.device) -> Vendor:
    """Return the row of an accelerator."""
    return VENDORS[device.type]


def triton_options(kind: str) -> Mapping[str, bool] | None:
    """Return the options with which Triton's kernels run on a kind of device; None: they do not."""
    return VENDORS[kind].triton if kind in VENDORS else None


def launching_on(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which Triton launches on a device of tensors: it takes the thread's current one."""
    import torch

    return nullcontext() if device.type == "cpu" else torch.accelerator.device_index(device.index)


def why_no_kernel(kind: str, try_it: Callable[[torch.device], str], instead: str) -> str | None:
    """Return why one of our Triton kernels does not run on a kind of device; None: it does.

    A kernel that fails, or whose results are wrong, is warned of.

    Args:
        kind: The kind of device, in torch's words.
        try_it: The trial, on a device, which says what is wrong with the kernel's results; empty: nothing.
        instead: What happens then, in the words of the warning.
    """
    import torch

    if triton_options(kind) is None:
        return f"Triton is not used on {kind}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    try:
        wrong = try_it(torch.device(kind, torch.accelerator.current_device_index()))
    except Exception as error:  # of a compiler, a driver or another version of Triton: anything
        said = (str(error).strip() or "nothing said").splitlines()[0]
        wrong = f"fails ({type(error).__name__}: {said})"
    if not wrong:
        return None
    reason = f"Triton's kernel {wrong}"
    _log.warning("%s: %s, which takes longer", reason, instead)
    return reason


def can_compile(device: torch.device) -> bool:
    """Whether layers may be compiled for a device where that is left open.

    On the CPU (and on the lanes of tests, which compute there) the promise is the resident model's bits, and
    compiled kernels round differently.
    """
    return device.type != "cpu" and vendor_of(device).has_compiler and missing_compiler() is None


def missing_compiler() -> str | None:
    """Return what torch lacks here to compile for an accelerator; None: nothing."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "a C compiler, by the name of cc, gcc or clang"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return f"Python's headers, {sysconfig.get_path('include')}/Python.h"
    return None


def device_module(kind: str) -> Any:
    """Return torch's module of a kind of device."""
    import torch

    return torch.get_device_module(kind)


def device_name(device: torch.device) -> str:
    """Return what the vendor calls an accelerator."""
    return str(device_module(device.type).get_device_name(device))


def free_bytes(device: torch.device) -> int:
    """Return how much of an accelerator's memory nobody uses."""
    return int(device_module(device.type).mem_get_info(device)[0])


def peak_bytes(device: torch.device) -> int:
    """Return the most bytes that torch had allocated on an accelerator since `reset_peak_bytes`."""
    return int(device_module(device.type).max_memory_allocated(device))


def allocator_counts(device: torch.device) -> tuple[int, int]:
    """Return how often torch gave back what it kept, to find memory, and the bytes kept that nobody uses.

    To give memory back it waits for the device.
    """
    stats = device_module(device.type).memory_stats(device)
    unused = stats.get("reserved_bytes.all.current", 0) - stats.get("allocated_bytes.all.current", 0)
    return int(stats.get("num_alloc_retries", 0)), int(unused)


def reset_peak_bytes(device: torch.device) -> None:
    """Count the peak from here."""
    device_module(device.type).reset_peak_memory_stats(device)


def give_back_memory(device: torch.device) -> None:
    """Let go of what torch keeps of an accelerator's memory for later."""
    device_module(device.type).empty_cache()


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generator from which operations on an accelerator draw."""
    state: torch.Tensor = device_module(device.type).get_rng_state(device)
    return state


def set_random_state(device: torch.device, state: torch.Tensor) -> None:
    """Set that generator."""
    device_module(device.type).set_rng_state(state, device)
