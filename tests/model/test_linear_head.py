"""Linear heads: which models have one, and its loss and gradients against autograd's."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CohereConfig, PreTrainedModel, Qwen2VLConfig

from megatrain.hardware.accelerators import launching_on
from megatrain.model.head import linear
from megatrain.model.head.form import Form, form_of, linear_of
from megatrain.model.head.linear import LinearHead, try_kernel
from megatrain.model.shares import IGNORED
from tests.families import FAMILIES
from tests.optim.interpreter import counted, interpreted_on_cpu
from tests.reference import assert_same_bits, make_model

FORMS = {"gemma2": Form(cap=30.0), "granite": Form(scale=0.5)}


@pytest.mark.parametrize("family", [*FAMILIES])
def test_the_form_of_a_family_s_head(family: str) -> None:
    config = FAMILIES[family]()
    assert form_of(config) == FORMS.get(family, Form())
    assert type(linear_of(make_model(config))) is nn.Linear


def test_a_scale_is_that_of_the_configuration() -> None:
    config = CohereConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        logit_scale=0.0625,
    )
    assert form_of(config) == Form(scale=0.0625)


def test_a_loss_or_a_layer_of_another_kind_is_none() -> None:
    model = make_model(FAMILIES["llama"]())
    model.loss_function = lambda *_, **__: torch.zeros(())
    assert linear_of(model) is None
    model = make_model(FAMILIES["llama"]())
    model.lm_head.forward = model.lm_head.forward
    assert linear_of(model) is None


def rows_of(model: PreTrainedModel, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    width = model.get_output_embeddings().weight.shape[1]
    targets = torch.randint(128, (37,), generator=generator)
    targets[::5] = IGNORED
    return torch.randn((37, width), generator=generator).to(dtype), targets


def of_autograd(model: PreTrainedModel, hidden: Tensor, targets: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Return the loss and the gradients that a model's own operations give in a dtype."""
    head = model.get_output_embeddings()
    leaves = [hidden.to(dtype), *(parameter.detach().to(dtype) for parameter in head.parameters())]
    for leaf in leaves:
        leaf.requires_grad_()
    form = form_of(model.config)
    assert form is not None
    logits = nn.functional.linear(*leaves) * form.scale
    if form.cap is not None:
        logits = torch.tanh(logits / form.cap) * form.cap
    wide = torch.float32 if dtype == torch.bfloat16 else dtype
    loss = nn.functional.cross_entropy(logits.to(wide), targets, reduction="sum", ignore_index=IGNORED) / 90
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def of_head(model: PreTrainedModel, hidden: Tensor, targets: Tensor, factor: float | None) -> list[Tensor]:
    """Return what the linear head gives of the same, in one chunk."""
    form, layer = form_of(model.config), linear_of(model)
    assert form is not None
    assert layer is not None
    leaves = list(layer.parameters())
    sums: list[Tensor | None] = [None] * len(leaves)
    given = None if factor is None else torch.tensor(factor)
    with torch.no_grad():
        loss, of_hidden = LinearHead(layer, form).gradients(hidden, targets, 90, given, leaves, sums)
    return [loss, of_hidden, *(held for held in sums if held is not None)]


@pytest.mark.parametrize("piece", [1 << 23, 300])
@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "phi"])
def test_loss_and_gradients_are_autograd_s(family: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In fp32 within rounding; in bf16 nearer to the truth than the model's own operations, or as near."""
    monkeypatch.setattr(linear, "_PIECE_NUMEL", piece)
    monkeypatch.setattr(linear, "_PRODUCT_NUMEL", piece)
    model = make_model(FAMILIES[family]())
    hidden, targets = rows_of(model, torch.float32)
    found, expected = (
        of_head(model, hidden, targets, None),
        of_autograd(model, hidden, targets, torch.float32),
    )
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6 * float(other.abs().max()))
    model.to(torch.bfloat16)
    hidden = hidden.bfloat16()
    truth = of_autograd(model, hidden, targets, torch.float64)
    own = of_autograd(model, hidden, targets, torch.bfloat16)
    for one, other, exact in zip(of_head(model, hidden, targets, None), own, truth, strict=True):
        assert (one - exact).norm() <= 1.1 * (other - exact).norm() + 1e-7


def test_a_factor_multiplies_gradients_and_not_the_loss() -> None:
    model = make_model(FAMILIES["llama"]())
    hidden, targets = rows_of(model, torch.float32)
    plain, quarter = (of_head(model, hidden, targets, factor) for factor in (None, 0.25))
    assert_same_bits(quarter[0], plain[0])
    for one, other in zip(quarter[1:], plain[1:], strict=True):
        assert_same_bits(one, other / 4)


@pytest.mark.parametrize("fault", [False, True])
def test_sums_go_on_in_fp32(fault: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chunks give the sum of what each gives, to the bit; a gradient in bf16 gives another one."""
    if fault:
        right = linear._add_product
        monkeypatch.setattr(
            linear, "_add_product", lambda held, *given: right(held, *given).bfloat16().float()
        )
    model = make_model(FAMILIES["phi"](), dtype=torch.bfloat16)
    hidden, targets = rows_of(model, torch.bfloat16)
    layer = linear_of(model)
    assert layer is not None
    leaves = list(layer.parameters())
    head = LinearHead(layer, Form())
    sums: list[Tensor | None] = [None, None]
    alone: list[list[Tensor | None]] = []
    with torch.no_grad():
        for span in (slice(0, 20), slice(20, 37)):
            head.gradients(hidden[span], targets[span], 90, None, leaves, sums)
            alone.append([None, None])
            head.gradients(hidden[span], targets[span], 90, None, leaves, alone[-1])
    for number, is_wrong in ((0, fault), (1, False)):  # the weight, and the bias
        one, other = alone[0][number], alone[1][number]
        assert one is not None
        assert other is not None
        both = sums[number]
        assert both is not None
        assert torch.equal(both, one + other) is not is_wrong


@pytest.mark.sampled(3)
@pytest.mark.parametrize("form", [Form(), Form(scale=0.5), Form(cap=3.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_reads_each_logit_twice(form: Form, dtype: torch.dtype, monkeypatch: Any) -> None:
    monkeypatch.setattr(linear, "_BLOCK", 64)
    with interpreted_on_cpu():
        assert try_kernel(torch.device("cpu")) <= 1e-5
        generator = torch.Generator().manual_seed(3)
        logits = torch.randn((3, 1000), generator=generator).to(dtype)
        targets, factor = torch.tensor([5, IGNORED, 998]), torch.tensor(0.5)
        expected = logits.clone()
        losses = LinearHead(nn.Linear(1, 1), form)._enter_piece(expected, targets, factor)
        with counted() as touched:
            found = linear._enter_by_kernel(logits, targets, factor, form)
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
    rtol, atol = (2e-5, 1e-7) if dtype == torch.float32 else (1e-2, 1e-6)
    torch.testing.assert_close(logits, expected, rtol=rtol, atol=atol)
    row = 1000 * dtype.itemsize
    assert touched.stored == 3 * row + 3 * 4
    assert touched.loaded == 2 * 2 * row + 2 * dtype.itemsize + 3 * 8 + 2 * 4


@pytest.mark.parametrize("target", [-1, 1000, 1 << 40])
def test_a_target_that_is_no_token_makes_no_number(target: int) -> None:
    with interpreted_on_cpu():
        logits, targets = torch.zeros((2, 1000)), torch.tensor([target, 5])
        found = linear._enter_by_kernel(logits, targets, torch.tensor(1.0), Form())
    assert found.isnan().tolist() == [True, False]
    assert logits[0].isnan().all(), "or an update would be made with them"
    assert logits[1].isfinite().all()


def test_logits_that_are_minus_infinity_for_a_whole_block_add_nothing() -> None:
    with interpreted_on_cpu():
        logits = torch.randn((2, 2 * linear._BLOCK), generator=torch.Generator().manual_seed(0))
        logits[0, : linear._BLOCK] = -torch.inf
        logits[1, linear._BLOCK :] = -torch.inf
        targets, expected = torch.tensor([linear._BLOCK + 3, 3]), logits.clone()
        losses = LinearHead(nn.Linear(1, 1), Form())._enter_piece(expected, targets, torch.tensor(1.0))
        found = linear._enter_by_kernel(logits, targets, torch.tensor(1.0), Form())
    torch.testing.assert_close(found, losses, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits, expected, rtol=2e-5, atol=1e-7)


def test_no_rows_make_no_losses() -> None:
    with interpreted_on_cpu():
        none = torch.empty((0,), dtype=torch.int64)
        found = linear._enter_by_kernel(torch.empty((0, 1000)), none, torch.tensor(1.0), Form())
    assert found.shape == (0,)


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton takes the current device of the thread, which is another one where a run is given `cuda:1`."""
    asked: list[int | None] = []

    def device_index(index: int | None) -> AbstractContextManager[None]:
        asked.append(index)
        return nullcontext()

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    with launching_on(torch.device("cuda", 1)), launching_on(torch.device("cpu")):
        assert asked == [1]


def test_every_kind_of_hook_is_seen() -> None:
    for register in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        layer = nn.Linear(2, 2)
        head = LinearHead(layer, Form())
        assert not head.is_watched
        handle = getattr(layer, f"register_{register}_hook")(lambda *given: None)
        assert head.is_watched, register
        handle.remove()
        assert not head.is_watched
        handle = getattr(nn.modules.module, f"register_module_{register}_hook")(lambda *given: None)
        assert head.is_watched, register
        handle.remove()


def test_a_configuration_that_makes_no_small_model_has_no_form() -> None:
    """Its head runs by the model's own code."""
    assert form_of(Qwen2VLConfig()) is None
