"""How fast chats become tokens with a template and a mask, and rows are read; and whether memory is bounded.

Chats of several turns are made of the words of a text, until files have the asked sizes. In a process of its
own for each file they are prepared once, by one process and one thread: read, rendered, tokenised, masked and
packed. Then a loader reads the rows back. The last line is a JSON object.

    python -m benchmarks.data.prepare --tokenizer DIR --text FILE [--megabytes 100 400] [--out FILE]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

from benchmarks.report import emit, hardware

SEQ_LEN, ROWS = 2048, 4


def write_chats(file: Path, words: list[str], num_bytes: int) -> None:
    """Write conversations until the file has its size."""
    draw = random.Random(0)

    def say(role: str, most: int) -> dict[str, str]:
        start = draw.randrange(len(words) - most)
        return {"role": role, "content": " ".join(words[start : start + draw.randrange(most // 8, most)])}

    with file.open("w", encoding="utf-8") as out:
        while out.tell() < num_bytes:
            turns = [
                say(role, most)
                for _ in range(draw.randrange(1, 5))
                for role, most in (("user", 64), ("assistant", 160))
            ]
            out.write(json.dumps({"messages": turns}) + "\n")


def measure(tokenizer_path: str, file: str, *, profile: bool) -> dict[str, object]:
    """Prepare a file and read it back, in this process."""
    from megatrain.config.sections.data import DataConfig
    from megatrain.data.loader import PackedLoader
    from megatrain.data.prepare import Packing, prepare_rows
    from megatrain.data.read.examples import read_examples
    from megatrain.data.tokenizer import end_of_document, load_tokenizer
    from megatrain.data.tokens.encode import EncoderRecipe
    from megatrain.data.tokens.template import TrainOn, template_source

    tokenizer = load_tokenizer(tokenizer_path)
    end_id = end_of_document(tokenizer)
    recipe = EncoderRecipe(
        tokenizer=tokenizer, template=template_source(None, tokenizer), train_on=TrainOn(), end_id=end_id
    )
    packing = Packing(seq_len=SEQ_LEN, way="best_fit", too_long="auto", fill_id=end_id)
    data = DataConfig(path=file)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        profiler = cProfile.Profile()
        started, started_cpu = time.perf_counter(), time.process_time()
        if profile:
            profiler.enable()
        prepared = prepare_rows(
            lambda: read_examples(data), recipe, packing, folder=Path(folder), key="k", show_progress=print
        )
        profiler.disable()
        prepare_s, cpu_s = time.perf_counter() - started, time.process_time() - started_cpu
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        loader = PackedLoader(
            prepared.rows,
            micro_batch_size=ROWS,
            num_micro_batches=1,
            seed=0,
            packing="best_fit",
            name=prepared.fingerprint,
        )
        started = time.perf_counter()
        num_read = sum(step[0]["input_ids"].numel() for step in islice(loader, loader.steps_per_epoch))
        read_s = time.perf_counter() - started
        peak_reading = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(10)
    return {
        "bytes": os.path.getsize(file),
        "tokens": prepared.counts.tokens,
        "trained": prepared.counts.trained,
        "filled": round(prepared.counts.filled / (len(prepared.rows) * SEQ_LEN), 4),
        "prepare_tokens_per_s": round(prepared.counts.tokens / prepare_s),
        "prepare_tokens_per_cpu_s": round(prepared.counts.tokens / cpu_s),
        "read_tokens_per_s": round(num_read / read_s),
        "peak_bytes": peak,
        "peak_bytes_after_reading": peak_reading,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    """Measure each size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 400])
    parser.add_argument("--out", help="File for the JSON.")
    parser.add_argument("--file", help=argparse.SUPPRESS)
    parser.add_argument("--profile", action="store_true", help="Say where the time goes; slower.")
    arguments = parser.parse_args()
    if arguments.file is not None:
        print(json.dumps(measure(arguments.tokenizer, arguments.file, profile=arguments.profile)))
        return
    words = arguments.text.read_text(encoding="utf-8").split()
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for size in arguments.megabytes:
            file = Path(folder) / "chats.jsonl"
            write_chats(file, words, size * 1_000_000)
            command = [
                sys.executable,
                "-m",
                "benchmarks.data.prepare",
                "--tokenizer",
                arguments.tokenizer,
                "--file",
                str(file),
            ]
            command += ["--profile"] * arguments.profile
            done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
            print(done.stdout, end="", flush=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    growth = results[-1]["peak_bytes"] / results[0]["peak_bytes"] - 1
    emit(
        {
            "benchmark": "data-prepare",
            "hardware": hardware(),
            "tokenizer": arguments.tokenizer,
            "processes": 1,
            "peak_growth": round(growth, 4),
            "runs": results,
        },
        arguments.out,
    )


if __name__ == "__main__":
    main()
