"""Model shapes, random models and batches, and the time of a step with what is said of it.

Model FLOPs are 6 x (parameters without the embedding, with the head) per token plus causal attention at half;
what is recomputed does not count. A step's time is from one moment at which the device is idle to the next,
so the updates of a step that run during the next one are in it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.run import memory_of_process, reset_peak_of_process, synchronize
from benchmarks.report import spread
from megatrain.config.choice import Choice

HYPER: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MAX_GRAD_NORM = 1.0
MAX_POSITIONS = 8192

_SHAPES: dict[str, tuple[int, int, int, int, int, int, bool]] = {
    "8b": (4096, 14336, 32, 32, 8, 128256, False),
    "3b": (3072, 8192, 28, 24, 8, 128256, True),
    "deep": (2048, 5376, 180, 16, 8, 32000, False),
    "120b": (12288, 28672, 88, 96, 8, 32768, False),
}
"""Hidden and inner size, layers, heads, groups of heads, vocabulary, tied embeddings: Llama 3 8B, Llama 3.2
3B, narrow layers of 0.046B parameters each, and Mistral Large."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a step is given: micro-batches of equal size, of random tokens without padding."""

    seq_len: int
    rows: int
    """Sequences of a micro-batch."""
    num_micro_batches: int = 1
    document_len: int | None = None
    """Tokens of each document of a row; None: a row is one."""

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.seq_len * self.rows * self.num_micro_batches

    def sized(self, is_dry: bool) -> Work:
        """Return this, or something tiny in its place."""
        if not is_dry:
            return self
        count = min(self.num_micro_batches, 4)
        return Work(
            seq_len=max(16, self.seq_len // 32),
            rows=min(self.rows, 2),
            num_micro_batches=count,
            document_len=self.document_len and max(8, self.document_len // 32),
        )

    def micro_batches(self, vocab_size: int) -> list[dict[str, Any]]:
        """Draw the step's micro-batches: the same tokens however many there are."""
        import torch

        shape = (self.num_micro_batches, self.rows, self.seq_len)
        ids = torch.randint(0, vocab_size, shape, generator=torch.Generator().manual_seed(1))
        batches = [{"input_ids": part, "labels": part} for part in ids]
        if self.document_len is not None:
            positions = (torch.arange(self.seq_len) % self.document_len).repeat(self.rows, 1)
            batches = [{**batch, "position_ids": positions} for batch in batches]
        return batches


def config_of(shape: str, is_dry: bool, num_layers: int | None = None) -> Any:
    """Return the configuration of a Llama of that shape."""
    from transformers import LlamaConfig

    hidden, inner, layers, heads, groups, vocabulary, is_tied = _SHAPES[shape]
    if is_dry:
        hidden, inner, heads, groups, vocabulary = 64, 128, 4, 2, 512
        layers = {"deep": 12, "120b": 6}.get(shape, 3)
        num_layers = num_layers and max(1, num_layers * layers // _SHAPES[shape][2])
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=num_layers or layers,
        num_attention_heads=heads,
        num_key_value_heads=groups,
        vocab_size=vocabulary,
        tie_word_embeddings=is_tied,
        max_position_embeddings=MAX_POSITIONS,
        use_cache=False,
        attn_implementation="sdpa",
    )


class Normal:
    """Normal numbers, drawn once, from which all weights are cut: to draw every weight takes minutes.

    Their number is a prime, so no two rows of a matrix are alike, and each weight begins elsewhere.
    """

    def __init__(self, std: float, device: Any = "cpu", numel: int = 16_777_213) -> None:
        """Draw fp32 values that bf16 holds exactly: a model is the same in either."""
        import torch

        drawn = torch.randn(numel, generator=torch.Generator().manual_seed(0)) * std
        self._pool = drawn.bfloat16().float().to(device)
        self._next = 0

    def fill(self, weight: Any) -> Any:
        """Fill a weight, and return it; norms are ones."""
        if weight.dim() < 2:
            return weight.fill_(1.0)
        flat, done = weight.view(-1), 0
        while done < flat.numel():
            part = self._pool[self._next : self._next + flat.numel() - done]
            flat[done : done + part.numel()].copy_(part)
            done += part.numel()
            self._next = (self._next + part.numel()) % self._pool.numel()
        return weight


def random_model(config: Any, *, dtype: Any, device: Any = "cpu", small: bool = False) -> Any:
    """Make a random model on a device; `small` draws fewer numbers."""
    import torch

    from megatrain.model.weights.skeleton import build_skeleton

    model = build_skeleton(config, dtype=dtype).train()
    normal = Normal(config.initializer_range, device, **({"numel": 65_521} if small else {}))
    put_parameters(
        model, lambda _, parameter: normal.fill(torch.empty(parameter.shape, dtype=dtype, device=device))
    )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model


def put_parameters(model: Any, make: Callable[[str, Any], Any]) -> None:
    """Replace each parameter by what `make` returns for its name and itself; ties stay ties."""
    import torch

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    made: dict[int, Any] = {}
    for module in model.modules():
        for leaf, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = torch.nn.Parameter(make(names[id(parameter)], parameter))
            module._parameters[leaf] = made[id(parameter)]


def num_parameters(model: Any) -> int:
    """Count a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def model_flops(config: Any, parameters: int, seq_len: int) -> float:
    """Return the FLOPs of a token: forward and backward, causal attention at half, nothing recomputed."""
    embedding = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    width = config.num_attention_heads * (
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
    return 6.0 * (parameters - embedding) + 6.0 * config.num_hidden_layers * width * seq_len


Step = Callable[[], tuple[float, float]]
"""Trains one step; returns its loss and the norm of its gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measuring:
    """How long, on what, and against which peak."""

    device: Any
    peak_flops: float
    until: float
    """`time.monotonic()` at which to be done."""
    warm_up: int = 2
    steps: int = 6


def measure(
    step: Step,
    measuring: Measuring,
    *,
    work: Work,
    config: Any,
    parameters: int,
    warm_up: Step | None = None,
    after_warm_up: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Train until there are steps enough or the time is over; returns the figures.

    Raises:
        AssertionError: A gradient norm of 0, or a loss that is not finite.
    """
    device = measuring.device
    reset_peak_of_process()
    retries = allocator_retries(device)
    losses: list[float] = []
    norms: list[float] = []
    warm_s = [timed(warm_up or step, device, losses, norms) for _ in range(measuring.warm_up)]
    if warm_up is not None:
        losses, norms = [], []  # of other work
    after_warm_up()
    seconds: list[float] = []
    launching_s = time.thread_time()
    while len(seconds) < measuring.steps:
        if seconds and time.monotonic() + 1.1 * seconds[-1] > measuring.until:
            break
        seconds.append(timed(step, device, losses, norms))
    launching_s = (time.thread_time() - launching_s) / len(seconds)
    assert all(norm > 0 for norm in norms), f"gradient norms are {norms}"
    assert all(abs(loss) < float("inf") for loss in losses), f"losses are {losses}"
    found = spread(seconds)
    flops = model_flops(config, parameters, work.seq_len) * work.tokens / found["median"]
    return {
        "tokens_per_step": work.tokens,
        "seq_len": work.seq_len,
        "micro_batches": work.num_micro_batches,
        "num_layers": config.num_hidden_layers,
        "num_parameters": parameters,
        "tokens_per_s": work.tokens / found["median"],
        "step_s": found,
        "num_steps": len(seconds),
        "warm_up_s": warm_s,
        "launcher_cpu_s": launching_s,
        "model_flops_per_s": flops,
        "of_matmul_peak": flops / measuring.peak_flops,
        **device_bytes(device),
        "allocator_retries": allocator_retries(device) - retries,
        "host_rss_bytes": memory_of_process(),
        "host_rss_bytes_peak": memory_of_process("VmHWM"),
        "losses": losses,
        "grad_norms": norms,
        "is_falling": losses[-1] < losses[0] if len(losses) > 1 else None,
    }


def timed(step: Step, device: Any, losses: list[float], norms: list[float]) -> float:
    """Train one step, note its loss and norm, and return its seconds."""
    synchronize(device)
    began = time.perf_counter()
    loss, norm = step()
    synchronize(device)
    seconds = time.perf_counter() - began
    losses.append(loss)
    norms.append(norm)
    return seconds


def device_bytes(device: Any) -> dict[str, int]:
    """Return the most bytes that tensors took, and the most that torch took for them."""
    import torch

    if device.type != "cuda":
        return {}
    return {
        "device_bytes_peak": torch.cuda.max_memory_allocated(device),
        "device_bytes_reserved_peak": torch.cuda.max_memory_reserved(device),
    }


def allocator_retries(device: Any) -> int:
    """Return how often torch had to give back what it kept before it found memory; each time it waits."""
    import torch

    return 0 if device.type != "cuda" else int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0))


def attempts_until_one_fits(
    attempts: list[dict[str, Any]], run: Callable[[dict[str, Any]], dict[str, Any]], clean: Callable[[], None]
) -> Iterator[dict[str, Any]]:
    """Yield a row for each attempt that memory refuses, and the row of the first that runs.

    Raises:
        RuntimeError: None ran.
    """
    import torch

    from megatrain.errors import CapacityError

    for attempt in attempts:
        try:
            row = run(attempt)
        except (torch.OutOfMemoryError, CapacityError) as error:
            message = f"{type(error).__name__}: {error}"[:600]
            error.__traceback__ = None  # its frames hold the tensors
            clean()
            yield {"refused": described(attempt), "error": message}
            continue
        yield row
        return
    raise RuntimeError(f"none of {len(attempts)} attempts fits into memory")


def described(values: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten lists of policies: `recompute x24, keep x8`."""
    short: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], str):
            runs: list[list[Any]] = []
            for name in map(str, value):
                if runs and runs[-1][0] == name:
                    runs[-1][1] += 1
                else:
                    runs.append([name, 1])
            names = [f"{name} x{count}" for name, count in runs]
            short[key] = ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:4])}, ..."
        elif isinstance(value, (set, frozenset)):
            short[key] = len(value)
        elif isinstance(value, Choice):
            short[key] = value.describe()
        else:
            short[key] = value
    return short
