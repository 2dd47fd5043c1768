"""The cost of a checkpoint: a drive's rate beside that of saves and loads, and steps with and without them.

    python -m benchmarks.checkpoint.saves [--file-gib 4] [--shape 30M|300M|8B] [--layers N] [--device cpu]
        [--tokens 512] [--steps 40] [--every 10] [--pairs 3] [--directory DIR] [--out FILE]

First the same bytes go to one file system by plain direct writes of four threads and as a checkpoint in the
background, in turn, and are read back by plain direct reads, by `verify`, and into memory by a load that
verifies, beside which plain direct reads stand again. Then a random llama takes the
same steps without checkpoints, with ones in the background, with ones that it waits for, and without
checkpoints and without a watch over its memory, in turn: the figures are by how much each checkpoint makes a
run longer, in steps, and by how much the watch does. `--shape 8B` has the layers of Llama-3.1-8B, two of them
unless said, and a small vocabulary; with `--device emulated` they pass a device that is made of host memory.
`--file-gib 0` leaves the rates out.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from benchmarks.report import emit, hardware, spread
from megatrain.checkpoint.background import NUM_THREADS, ChunkWriter
from megatrain.checkpoint.contents import Group
from megatrain.checkpoint.format import CHUNK_BYTES
from megatrain.checkpoint.load import verify
from megatrain.checkpoint.reader import CheckpointReader, Piece
from megatrain.checkpoint.saver import Saver, Wanted
from megatrain.checkpoint.tensor_files import planned_file

GIB = 1 << 30
_PLACES = ("out", "directory")
_SHAPES = {
    "30M": {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 8},
    "300M": {
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 18,
    },
    "8B": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 2,
    },
}


def main() -> None:
    """Measure, and say what a checkpoint costs."""
    style = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=style)
    parser.add_argument("--file-gib", type=int, default=4)
    parser.add_argument("--shape", choices=_SHAPES, default="30M")
    parser.add_argument("--layers", type=int, default=None, help="in place of the shape's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--directory", default=None, help="where to write; a temporary one by default")
    parser.add_argument("--out", help="file to save the JSON line to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        num_rates = arguments.pairs if arguments.file_gib else 0
        rates = [_rates(Path(directory), arguments.file_gib) for _ in range(num_rates)]
        runs = [_steps(Path(directory), arguments) for _ in range(arguments.pairs)]
    ratios = {
        "write": [each["raw_write_s"] / each["save_s"] for each in rates],
        "verified read": [each["raw_read_s"] / each["verify_s"] for each in rates],
        "verified load": [each["raw_reread_s"] / each["load_s"] for each in rates],
    }
    cpu = [each["save_cpu_s"] / arguments.file_gib for each in rates]
    if rates:
        for name, found in ratios.items():
            print(f"{name}: {statistics.median(found):.2f} of the drive's rate")
        print(f"a save takes {statistics.median(cpu):.2f} CPU seconds per GiB")
    num_saves = (arguments.steps - 1) // arguments.every
    step_s = statistics.median(each["none"] / arguments.steps for each in runs)
    added = {
        mode: [(each[mode] - each["none"]) / num_saves / (each["none"] / arguments.steps) for each in runs]
        for mode in ("background", "blocking")
    }
    for mode, steps in added.items():
        print(f"{mode}: a checkpoint adds {statistics.median(steps):+.2f} steps of {step_s:.2f} s")
    watch = [each["none"] / each["unwatched"] - 1 for each in runs]
    print(f"the watch over memory adds {100 * statistics.median(watch):+.1f} % of a step")
    result = {
        "benchmark": "saves",
        "rates": rates,
        "ratios": {name: spread(found) for name, found in ratios.items() if rates},
        "save_cpu_s_per_gib": spread(cpu) if rates else None,
        "runs_s": runs,
        "watch_adds": spread(watch),
        "added_steps": {mode: spread(found) for mode, found in added.items()},
        "config": {
            name: value for name, value in vars(arguments).items() if name not in ("out", "directory")
        },
        "hardware": hardware(),
    }
    emit(result, arguments.out)


def _rates(directory: Path, file_gib: int) -> dict[str, float]:
    """Write and read the same bytes plainly and as a checkpoint, and return the seconds."""
    numel = file_gib * GIB // 4
    values = torch.rand(1 << 20).repeat(numel >> 20)
    raw, root = directory / "raw", directory / "checkpoints"
    found = {"raw_write_s": _timed(partial(_write_raw, raw, values))}
    spec = {"values": (values.dtype, tuple(values.shape))}
    group = Group(blocks=frozenset([0]), read=partial(_lend, {"values": values}))
    planned = [planned_file("values.safetensors", spec, {"values": group})]
    saver = Saver(root, ChunkWriter(8 * CHUNK_BYTES, planned))
    cpu = time.process_time()

    def save() -> None:
        wanted = Wanted(step=1, files=planned, write_rest=lambda _: None, meta={}, keep_last=1)
        saver.begin(wanted, ())
        saver.result()

    found["save_s"] = _timed(save)
    found["save_cpu_s"] = time.process_time() - cpu
    saver.close()
    found["raw_read_s"] = _timed(partial(_read_raw, raw))
    path = root / "step-00000001"
    _forget(path / "values.safetensors")
    found["verify_s"] = _timed(partial(verify, path))
    _forget(path / "values.safetensors")
    found["raw_reread_s"] = _timed(partial(_read_raw, raw))
    expected = values[-(1 << 20) :].clone()
    values.fill_(0)  # its pages are there already, as those of a state that is locked
    found["load_s"] = _timed(partial(_load, path, values))
    assert torch.equal(values[-(1 << 20) :], expected)
    raw.unlink()
    shutil.rmtree(root)
    return found


def _forget(path: Path) -> None:
    """Have the page cache forget a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def _load(path: Path, values: Tensor) -> None:
    """Read a checkpoint's values into memory as a resume does: each chunk once, and compared."""
    names = ["values.safetensors"]
    reader = CheckpointReader(path, verify(path, is_later=names.__contains__), names)
    begin = reader.places(names[0])["values"].begin
    reader.copy([Piece(names[0], begin, values.view(torch.uint8).numpy())])
    reader.finish()


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@contextmanager
def _lend(tensors: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    yield tensors


def _in_threads(num_bytes: int, work: Callable[[int, mmap.mmap], None]) -> None:
    """Call `work` with the offset of each chunk and a buffer, in as many threads as a save has."""
    offsets = iter(range(0, num_bytes, CHUNK_BYTES))
    lock = threading.Lock()

    def run() -> None:
        buffer = mmap.mmap(-1, CHUNK_BYTES)
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            work(offset, buffer)

    threads = [threading.Thread(target=run) for _ in range(NUM_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _write_raw(path: Path, values: Tensor) -> None:
    """Write all bytes by direct writes, without a sum."""
    data = memoryview(values.numpy()).cast("B")
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | _direct(path.parent), 0o600)

    def write(offset: int, buffer: mmap.mmap) -> None:
        buffer[:] = data[offset : offset + CHUNK_BYTES]
        os.pwrite(descriptor, buffer, offset)

    _in_threads(len(data), write)
    os.fsync(descriptor)
    os.close(descriptor)


def _read_raw(path: Path) -> None:
    """Read all bytes by direct reads."""
    descriptor = os.open(path, os.O_RDONLY | _direct(path.parent))
    _in_threads(path.stat().st_size, lambda offset, buffer: os.preadv(descriptor, [buffer], offset) and None)
    os.close(descriptor)


def _direct(directory: Path) -> int:
    """Return the flag of direct reads and writes, if the file system takes them."""
    probe = directory / "probe"
    try:
        os.close(os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError:
        return 0
    finally:
        probe.unlink(missing_ok=True)
    return os.O_DIRECT


def _steps(directory: Path, arguments: Any) -> dict[str, float]:
    """Train the same steps in each way of saving; return the seconds from the end of the first one."""
    from megatrain.config import build_config
    from megatrain.train.loop import train

    model = directory / "model"
    if not model.exists():
        _write_inputs(directory, arguments)
    found = {}
    ways: dict[str, dict[str, Any]] = {
        "none": {"every": None},
        "background": {"every": arguments.every},
        "blocking": {"every": arguments.every, "background": False},
        "unwatched": {"every": None},
    }
    for mode, checkpoint in ways.items():
        out = directory / mode
        config = build_config(
            {
                "model": {"path": str(model), "init": "random"},
                "data": {"path": str(directory / "corpus.txt"), "seq_len": arguments.tokens},
                "train": {
                    "steps": arguments.steps,
                    "micro_batch_size": 1,
                    "grad_accumulation": 1,
                    "device": arguments.device,
                    "precision": "bf16",
                },
                "optim": {"lr": 1e-3, "warmup_steps": 1},
                "checkpoint": checkpoint,
                "memory": {"watch": "off" if mode == "unwatched" else "auto"},
                "log": {"progress": "none", "report": False},
                "out": str(out),
            }
        )
        clock = _Clock()
        train(config, callbacks=[clock])
        found[mode] = clock.times[-1] - clock.times[0]
        shutil.rmtree(out)
    return found


class _Clock(TrainerCallback):
    """Notes when each step has ended; what is saved after it counts to the next one."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(time.perf_counter())


def _write_inputs(directory: Path, arguments: Any) -> None:
    from transformers import LlamaConfig

    shape = dict(_SHAPES[arguments.shape])
    if arguments.layers is not None:
        shape["num_hidden_layers"] = arguments.layers
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=300,
        **shape,
        max_position_embeddings=arguments.tokens,
        bos_token_id=0,
        eos_token_id=0,
    ).save_pretrained(directory / "model")
    text = "one small step for a block, one giant leap through the slots\n"
    (directory / "corpus.txt").write_text(text * (arguments.tokens * (arguments.steps + 2) // len(text) + 1))


if __name__ == "__main__":
    main()
