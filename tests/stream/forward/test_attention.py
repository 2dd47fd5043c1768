"""The order of attention kernels: chosen by compute capability, the same in every thread, put back."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.attention import SDPBackend

from benchmarks.gpu.attention import SEQ_LENS, compare_attention
from megatrain.hardware.accelerators import vendor_of
from megatrain.stream.forward.attention import (
    attention_of,
    attention_order,
    choose_attention,
    chosen_kernels,
)
from tests.families import FAMILIES
from tests.reference import make_model


@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (10, 3)])
def test_cudnn_comes_first_on_hopper_and_data_center_blackwell(capability: tuple[int, int]) -> None:
    order = choose_attention(capability)
    assert order is not None
    assert order[0] is SDPBackend.CUDNN_ATTENTION
    assert order[1] is SDPBackend.FLASH_ATTENTION
    assert order[-1] is SDPBackend.MATH


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 9), (12, 0), (12, 1), None])
def test_order_is_torchs_elsewhere(capability: tuple[int, int] | None) -> None:
    assert choose_attention(capability) is None


def test_order_is_torchs_on_other_makers_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_attention(vendor_of(torch.device("xpu")).capability(torch.device("xpu"))) is None
    monkeypatch.setattr(torch.version, "hip", "7.0")  # whose capabilities count otherwise
    assert choose_attention(vendor_of(torch.device("cuda")).capability(torch.device("cuda"))) is None
    assert attention_of(torch.device("cpu")) is None


def test_order_holds_in_every_thread_and_is_put_back() -> None:
    """Recomputation on CUDA runs on autograd's own thread."""
    before = torch._C._get_sdp_priority_order()
    seen: list[list[int]] = []
    with attention_order(choose_attention((9, 0))):
        thread = threading.Thread(target=lambda: seen.append(torch._C._get_sdp_priority_order()))
        thread.start()
        thread.join()
    assert seen[0] != before
    assert SDPBackend(seen[0][0]) == SDPBackend.CUDNN_ATTENTION
    assert torch._C._get_sdp_priority_order() == before


def test_a_kernel_that_is_off_stays_off() -> None:
    torch.backends.cuda.enable_flash_sdp(False)
    try:
        with attention_order(choose_attention((9, 0))):
            assert not torch.backends.cuda.flash_sdp_enabled()
            assert torch.backends.cuda.cudnn_sdp_enabled()
            assert torch.backends.cuda.mem_efficient_sdp_enabled()
    finally:
        torch.backends.cuda.enable_flash_sdp(True)


def test_no_choice_changes_nothing() -> None:
    before = torch._C._get_sdp_priority_order()
    with attention_order(None):
        assert torch._C._get_sdp_priority_order() == before


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_attention_runs_in_the_chosen_order_on_cuda() -> None:
    device = torch.device("cuda")
    q, k, v = (torch.randn(2, 4, 128, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    with attention_order(attention_of(device)):
        actual = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("device", "seq_len"),
    [
        ("cpu", 40),
        *(
            pytest.param(
                "cuda",
                seq_len,
                marks=[
                    pytest.mark.gpu,
                    pytest.mark.skipif(
                        not torch.cuda.is_available(), reason="needs CUDA: cuDNN and flash attention in bf16"
                    ),
                ],
            )
            for seq_len in SEQ_LENS
        ),
    ],
)
@pytest.mark.parametrize("is_deterministic", [False, True])
def test_the_default_attention_in_bf16_equals_the_resident_model_s(
    device: str, seq_len: int, is_deterministic: bool
) -> None:
    """On a CPU bit for bit, and twice the same; on CUDA within a tolerance, and a deterministic one twice."""
    heads = 2 if device == "cpu" else 4
    row = compare_attention(
        torch.device(device), seq_len=seq_len, num_heads=heads, is_deterministic=is_deterministic
    )
    assert row["is_ok"], row
    assert row["kernel"] in ("FLASH_ATTENTION", "CUDNN_ATTENTION")[: 1 if is_deterministic else 2]
    assert row["is_repeated"] or not is_deterministic
    if device == "cpu":
        assert (row["is_repeated"], row["is_bitwise"]) == (True, True), row


def test_results_that_repeat_take_no_cudnn() -> None:
    """torch leaves it out itself then; the other kernels have forms that repeat."""
    order = choose_attention((8, 0), repeats=True)
    assert choose_attention((9, 0), repeats=True) == order
    assert order == (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)
    assert choose_attention(None, repeats=True) is None, "of others, what torch does is all there is"
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with attention_order(order):
        assert SDPBackend(torch._C._get_sdp_priority_order()[0]) == SDPBackend.FLASH_ATTENTION
        assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("repeats", [False, True])
def test_kernels_are_chosen_for_as_long_as_a_model_is_attached(
    repeats: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on_hopper(device: torch.device, *, repeats: bool) -> tuple[SDPBackend, ...] | None:
        return choose_attention((9, 0), repeats=repeats)

    monkeypatch.setattr("megatrain.stream.forward.attention.attention_of", on_hopper)
    first = SDPBackend.FLASH_ATTENTION if repeats else SDPBackend.CUDNN_ATTENTION
    model = make_model(FAMILIES["llama"]())
    with chosen_kernels(model, torch.device("cpu"), repeats=repeats):
        assert SDPBackend(torch._C._get_sdp_priority_order()[0]) == first
        assert torch.are_deterministic_algorithms_enabled() == repeats
    assert not torch.are_deterministic_algorithms_enabled()
