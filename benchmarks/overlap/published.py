"""Published rows of rivals, and how well their programs predict one from another.

For every system, one rate (FLOPs per second) is fitted on one row by arithmetic; links and host memory are
those of the machine file. Other rows of the system are then replayed at that rate. Tokens per second are as
published; MegaTrain publishes 6 N B S over time, which is turned back into a time.

Not predicted: MegaTrain's Qwen3.5-27B (linear attention: other kernels), its 14B on GH200 (no batch size
published), figures of several GPUs, and systems whose step is not described.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.overlap.replay import measure, step_seconds
from benchmarks.overlap.rivals import Accumulation, accumulation_step, megatrain_step, zero3_step
from benchmarks.overlap.work import Costs, Rates, Shape, Step

TOLERANCE = 0.10

LLAMA_8B = Shape(name="Llama-8B", num_blocks=32)
LLAMA_15B = Shape(name="Llama-8B of 64 layers", num_blocks=64)
QWEN_7B = Shape(name="Qwen2.5-7B", num_blocks=28, hidden=3584, intermediate=18944, kv_dim=512, vocab=152064)
QWEN_14B = Shape(
    name="Qwen2.5-14B", num_blocks=48, hidden=5120, intermediate=13824, kv_dim=1024, vocab=152064
)
QWEN_32B = Shape(
    name="Qwen2.5-32B", num_blocks=64, hidden=5120, intermediate=27648, kv_dim=1024, vocab=152064
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One published figure, with the setting that it was measured in."""

    shape: Shape
    tokens: int
    tokens_per_s: float
    rounds: int = 1
    seq_len: int = 1024
    recomputed_share: float = 0.0
    """Of all FLOPs, those of recomputation, where the source records it."""
    note: str = ""
    """What is known to differ between this row and the calibrated one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class System:
    """Rows of one system on one machine; the first one is calibrated on."""

    name: str
    machine: str
    source: str
    build: Callable[[Costs, Row], Step]
    rows: tuple[Row, ...]
    num_quick: int = 1
    """Predicted rows of a quick run."""


def _megatrain(costs: Costs, row: Row) -> Step:
    return megatrain_step(costs, tokens=row.tokens, num_micro_batches=row.rounds)


def _zero3(costs: Costs, row: Row) -> Step:
    return zero3_step(costs, tokens=row.tokens, num_micro_batches=row.rounds)


def _ml_dataflow(costs: Costs, row: Row) -> Step:
    """Rounds of chunks, all in bf16, AdamW on the device from streamed w, g, m, v (8 bytes up, 6 down)."""
    whole = costs.shape.num_blocks * costs.forward(row.tokens)
    recomputed = costs.model_flops(row.tokens) * row.recomputed_share / (1 - row.recomputed_share) / whole
    system = Accumulation(
        name="ml_dataflow",
        streams_weights=True,
        gradients_at_home=True,
        recomputed=recomputed,
        state_up=8,
        state_down=6,
    )
    return accumulation_step(costs, system, tokens=row.tokens, rounds=row.rounds)


def _llmq_4090(costs: Costs, row: Row) -> Step:
    """--shard-weights --recompute-block --offload-residual; master and moments, 14B: gradients, streamed."""
    at_home = row.shape is QWEN_14B
    system = Accumulation(
        name="llmq",
        streams_weights=True,
        gradients_at_home=at_home,
        saves_boundaries=True,
        recomputed=1.0,
        state_up=6 + 2 * at_home,
        state_down=6,
    )
    return accumulation_step(costs, system, tokens=row.tokens, rounds=row.rounds)


def _llmq_h100(costs: Costs, row: Row) -> Step:
    """7B: all resident. 14B: master and moments streamed, gate and up recomputed, residuals offloaded."""
    is_large = row.shape is QWEN_14B
    shape = row.shape
    system = Accumulation(
        name="llmq",
        streams_weights=False,
        gradients_at_home=False,
        saves_boundaries=is_large,
        recomputed=2 * shape.hidden * shape.intermediate / shape.block_params * is_large,
        state_up=6 * is_large,
        state_down=6 * is_large,
    )
    return accumulation_step(costs, system, tokens=row.tokens, rounds=row.rounds)


def _megatrain_rate(shape: Shape, tflops: float) -> float:
    return tflops * 1e12 / (6 * shape.num_params)


def _csv(shape: Shape, seq_len: int, seqs: int, rounds: int, rate: float, recomputed: float) -> Row:
    return Row(
        shape=shape,
        tokens=seq_len * seqs,
        tokens_per_s=rate,
        rounds=rounds,
        seq_len=seq_len,
        recomputed_share=recomputed,
    )


_ATTENTION = "longer sequences: attention kernels run at another rate than matmuls, and one rate is fitted"
_ROWS_32B = replace(QWEN_32B, name="32B", vocab=151936)

SYSTEMS = (
    System(
        name="MegaTrain",
        machine="h100-pcie5",
        source="DLYuanGod/MegaTrain README at 5cf47ac and 4df1f20, configs qwen_7b_1gpu and qwen_32b",
        build=_megatrain,
        rows=(
            Row(shape=QWEN_7B, tokens=158 * 1024, tokens_per_s=_megatrain_rate(QWEN_7B, 272)),
            Row(
                shape=QWEN_32B,
                tokens=96 * 1024,
                tokens_per_s=_megatrain_rate(QWEN_32B, 259),
                note="an earlier version: copies into staging buffers in Python, before every upload",
            ),
        ),
    ),
    System(
        name="ZeRO-3 offload",
        machine="rtx4090-pcie4",
        source="RegiaYoung/SlideFormer bench/DeepSpeed/ds_bench_1024_bf16_on_20260224_211132.csv",
        build=_zero3,
        num_quick=2,
        rows=(
            Row(shape=LLAMA_8B, tokens=16 * 1024, tokens_per_s=1372.9),
            Row(shape=LLAMA_8B, tokens=8 * 1024, tokens_per_s=913.6),
            Row(shape=LLAMA_8B, tokens=32 * 1024, tokens_per_s=1790.9),
        ),
    ),
    System(
        name="ZeRO-3 offload, LLaMA-Factory",
        machine="rtx4090-pcie4",
        source="IST-DASLab/llmq benchmarks/4090x1.md",
        build=_zero3,
        rows=(
            Row(shape=QWEN_7B, tokens=16 * 32 * 1024, rounds=16, tokens_per_s=2523),
            Row(
                shape=QWEN_14B,
                tokens=26 * 20 * 1024,
                rounds=26,
                tokens_per_s=1135,
                note="likely: before DeepSpeed #8207 gradients went home to pageable memory, and blocked; "
                "here they go behind compute, and this row has 3 times as many bytes of them",
            ),
        ),
    ),
    System(
        name="llmq, RTX 4090",
        machine="rtx4090-pcie4",
        source="IST-DASLab/llmq benchmarks/4090x1.md, bf16",
        build=_llmq_4090,
        rows=(
            Row(shape=QWEN_7B, tokens=512 * 1024, rounds=32, tokens_per_s=2777),
            Row(shape=QWEN_14B, tokens=512 * 1024, rounds=16, tokens_per_s=1348),
        ),
    ),
    System(
        name="llmq, H100",
        machine="h100-pcie5",
        source="IST-DASLab/llmq benchmarks/H100x1.md, bf16",
        build=_llmq_h100,
        rows=(
            Row(shape=QWEN_7B, tokens=512 * 1024, rounds=32, tokens_per_s=13863, note="128 rounds, 4 in one"),
            Row(shape=QWEN_14B, tokens=512 * 1024, rounds=64, tokens_per_s=6330),
        ),
    ),
    System(
        name="ml_dataflow",
        machine="h100-pcie5",
        source="als244/ml_dataflow bench/reproduce_results/recorded_data/h100_*_results.csv, best rows",
        build=_ml_dataflow,
        num_quick=2,
        rows=(
            _csv(LLAMA_8B, 4096, 144, 36, 12255.3, 0.011005),
            _csv(LLAMA_8B, 32768, 12, 12, 7907.8, 0.057196),
            _csv(_ROWS_32B, 32768, 9, 9, 2169.9, 0.091566),
            _csv(LLAMA_8B, 512, 1216, 38, 13134.7, 0.001475),
            _csv(LLAMA_8B, 16384, 30, 30, 10023.2, 0.035755),
            _csv(LLAMA_8B, 65536, 5, 5, 5544.9, 0.095965),
            _csv(LLAMA_8B, 131072, 1, 1, 3435.5, 0.140453),
            _csv(LLAMA_8B, 262144, 1, 1, 2089.8, 0.143926),
            _csv(LLAMA_8B, 524288, 1, 1, 1128.4, 0.149328),
            _csv(LLAMA_15B, 1024, 352, 22, 6085.5, 0.066527),
            _csv(LLAMA_15B, 32768, 7, 7, 3887.8, 0.077371),
            _csv(_ROWS_32B, 1024, 368, 23, 2756.4, 0.089774),
            _csv(_ROWS_32B, 262144, 1, 1, 642.2, 0.206499),
        ),
    ),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """A row against its replay."""

    system: str
    source: str
    model: str
    seq_len: int
    tokens: int
    published: float
    predicted: float
    fitted_flops_per_s: float
    drift: float
    """Of the replay, against the same program in arithmetic."""
    why: str

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.published - 1

    @property
    def is_close(self) -> bool:
        """Whether the error is within the tolerance."""
        return abs(self.error) <= TOLERANCE


def predictions(machines: dict[str, Rates], *, quick: bool, wall_s: float) -> Iterator[Prediction]:
    """Calibrate every system on its first row and replay the others; `wall_s` is the time of one replay."""
    for system in SYSTEMS:
        if system.machine not in machines:
            continue
        first, *others = system.rows
        rates = fitted(system, first, machines[system.machine])
        for row in others[: system.num_quick if quick else None]:
            costs = Costs(shape=row.shape, rates=rates, seq_len=row.seq_len)
            measured = measure(system.build(costs, row), wall_s=wall_s)
            prediction = Prediction(
                system=system.name,
                source=system.source,
                model=row.shape.name,
                seq_len=row.seq_len,
                tokens=row.tokens,
                published=row.tokens_per_s,
                predicted=row.tokens / measured.step_s,
                fitted_flops_per_s=rates.compute_flops_per_s,
                drift=measured.drift,
                why="",
            )
            if not prediction.is_close:
                why = row.note or (_ATTENTION if row.seq_len > first.seq_len else "not known")
                prediction = replace(prediction, why=why)
            yield prediction


def fitted(system: System, row: Row, rates: Rates) -> Rates:
    """Return the machine at the compute rate at which arithmetic gives the row's step time.

    Raises:
        AssertionError: No rate does.
    """
    wanted_s = row.tokens / row.tokens_per_s
    for _ in range(8):
        step = system.build(Costs(shape=row.shape, rates=rates, seq_len=row.seq_len), row)
        step_s = step_seconds(step)
        if abs(step_s / wanted_s - 1) < 1e-4:
            break
        compute_s = sum(t.work for t in step.tasks if t.kind in _COMPUTED) / rates.compute_flops_per_s
        assert wanted_s > step_s - compute_s, f"{system.name}: without compute a step takes too long already"
        factor = compute_s / (wanted_s - (step_s - compute_s))
        rates = rates.with_compute(rates.compute_flops_per_s * factor)
    return rates


_COMPUTED = ("forward", "backward", "head")
