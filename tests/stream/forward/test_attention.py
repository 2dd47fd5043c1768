"""The order of attention kernels: chosen by compute capability, the same in every thread, put back."""

from __future__ import annotations

import threading

import pytest
import torch
from torch.nn.attention import SDPBackend

from megatrain.hardware.accelerators import vendor_of
from megatrain.stream.forward.attention import attention_of, attention_order, choose_attention


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
