"""The losses of judged answers equal TRL's, in value and in gradients, whatever way the rows pass."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import megatrain
from megatrain.config.sections.preference import PreferenceConfig
from megatrain.data.pairs import Judged, PairPacker, judged_batch
from megatrain.objective.objective import Answers
from megatrain.objective.registry import OBJECTIVES
from megatrain.train.preference.answers import AnswerLoss
from tests.families import VOCAB_SIZE
from tests.hf.setups import arguments, tiny, tokenizer

NUM_ROWS, SEQ_LEN = 4, 16


def judged(count: int) -> list[Judged]:
    """Make prompts and two answers of random tokens, of several lengths."""
    generator = torch.Generator().manual_seed(3)

    def ids(number: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (number,), generator=generator).tolist()

    pairs = [(ids(2 + n), (ids(3 + n % 3), ids(7 - n))) for n in range(count)]
    return [Judged((prompt, prompt), both, is_good=n % 3 == 0) for n, (prompt, both) in enumerate(pairs)]


def batch_of(loss: str, examples: list[Judged], reference: Tensor) -> dict[str, Tensor]:
    if loss == "kto":
        examples = [Judged(one.prompts[:1], one.answers[:1], one.is_good) for one in examples]
    packer = PairPacker(SEQ_LEN, 2, borrows=loss == "kto")
    (rows,) = [rows for one in examples for rows in packer.add(one)] + list(packer.finish())
    return judged_batch(rows, reference.numpy())


def trl_batch(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sides of a batch as TRL's collators make them: first sides of all rows, then the others."""
    order = [*range(0, 2 * NUM_ROWS, 2), *range(1, 2 * NUM_ROWS, 2)]
    ids, labels = batch["input_ids"][order], batch["labels"][order]
    mask = (labels != -100).long()
    lengths = torch.tensor([int(row.nonzero().max()) + 1 for row in mask])
    attention = (torch.arange(SEQ_LEN) < lengths[:, None]).long()
    return {"input_ids": ids, "attention_mask": attention, "completion_mask": mask}


def theirs(trainer: Any, batch: dict[str, Tensor]) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Return TRL's loss of a batch, its gradients and what it logs."""
    trainer._metrics["train"].clear()
    trainer.model.zero_grad()
    loss = trainer.compute_loss(trainer.model, batch)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in trainer.model.named_parameters()}
    return (
        float(loss.detach()),
        gradients,
        {name: values[0] for name, values in trainer._metrics["train"].items()},
    )


def assert_equal(
    expected: Any, model: Any, loss_of_rows: AnswerLoss, batches: Any, lockstep: int, rounding: float = 1e-12
) -> None:
    """Compare loss, gradients and what is shown; `rounding` is that of a small difference of rewards."""
    loss, gradients, logged = expected
    engine = megatrain.attach(copy.deepcopy(model), activations="recompute", lockstep=lockstep)
    try:
        ours, shown = loss_of_rows.forward_backward(engine, batches, [0] * len(batches))
        found = {name: gradient.clone() for name, gradient in engine.named_gradients()}
    finally:
        engine.detach()
    assert float(ours) == pytest.approx(loss, rel=1e-6)
    for name, value in shown.items():
        assert value == pytest.approx(logged[name], rel=1e-5, abs=rounding), name
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert found.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-5, atol=1e-6 * largest, msg=name)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


REFERENCE = torch.tensor([[-20.0, -26.0], [-22.5, -28.0], [-31.0, -20.0], [-24.0, -17.5]])
"""Of no model, but near enough to a random one's that no loss is at its end."""


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning")
def test_dpo_equals_trl(tmp_path: Path, model: Any) -> None:
    """Each kind of loss within 1e-6, as one micro-batch, and as two in lockstep."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")
    from datasets import Dataset

    data = Dataset.from_list([{"prompt": "3 4", "chosen": " 5 6", "rejected": " 7"}] * 2)
    trainer = trl.DPOTrainer(
        model=copy.deepcopy(model),
        args=arguments(tmp_path, trl.DPOConfig, bf16=False, precompute_ref_log_probs=True, beta=0.3),
        train_dataset=data,
        processing_class=tokenizer(),
    )
    trainer.precompute_ref_logps = True
    examples = judged(NUM_ROWS)
    whole = batch_of("dpo", examples, REFERENCE)
    halves = [batch_of("dpo", examples[n : n + 2], REFERENCE[n : n + 2]) for n in (0, 2)]
    chosen, rejected = REFERENCE.unbind(1)
    batch = {**trl_batch(whole), "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    for kind, smoothing, batches in (
        ("sigmoid", 0.0, halves),
        ("ipo", 0.0, [whole]),
        ("hinge", 0.0, halves),
        ("robust", 0.2, [whole]),
    ):
        trainer.loss_types, trainer.label_smoothing = [kind], smoothing
        settings = PreferenceConfig.model_validate(
            {"beta": 0.3, "loss_type": kind, "label_smoothing": smoothing}
        )
        loss = AnswerLoss(OBJECTIVES["dpo"], settings)
        assert_equal(theirs(trainer, batch), model, loss, batches, len(batches))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing[a-z_]*. is deprecated:FutureWarning")
def test_kto_equals_trl(tmp_path: Path, model: Any) -> None:
    """With its KL term over the other answers, within 1e-6."""
    trl = pytest.importorskip("trl", reason="TRL is not installed: pip install trl peft")
    from datasets import Dataset

    words = [
        {"prompt": "3 4", "completion": " 5 6", "label": True},
        {"prompt": "5", "completion": " 6", "label": False},
    ]
    trainer = trl.KTOTrainer(
        model=copy.deepcopy(model),
        args=arguments(tmp_path, trl.KTOConfig, bf16=False, precompute_ref_log_probs=True, beta=0.3),
        train_dataset=Dataset.from_list(words * 2),
        processing_class=tokenizer(),
    )
    trainer.precompute_ref_logps, trainer.desirable_weight, trainer.undesirable_weight = True, 0.7, 1.3
    reference = REFERENCE - torch.tensor([0.0, 9.0])  # the KL term is above zero
    ours = batch_of("kto", judged(NUM_ROWS), reference)
    sides = {name: value.chunk(2) for name, value in trl_batch(ours).items()}
    batch = {name: first for name, (first, _) in sides.items()}
    batch |= {f"KL_{name}": second for name, (_, second) in sides.items()}
    batch |= {"label": ours["is_good"], "ref_logps": reference[:, 0], "ref_KL_logps": reference[:, 1]}
    settings = PreferenceConfig(beta=0.3, desirable_weight=0.7, undesirable_weight=1.3)
    assert ours["is_good"].tolist() == [True, False, False, True]
    loss = AnswerLoss(OBJECTIVES["kto"], settings)
    assert_equal(theirs(trainer, batch), model, loss, [ours], 1)
    assert trainer._metrics["train"]["kl"][0] > 1


def of_pairs(kind: Any, model: Any, batch: dict[str, Tensor], **settings: Any) -> Any:
    """Return what methods of a trainer of TRL without a reference make of pairs, as `theirs` does."""
    trainer, resident = kind.__new__(kind), copy.deepcopy(model)
    accelerator = SimpleNamespace(device=torch.device("cpu"), gather_for_metrics=lambda value: value)
    plain = {"is_encoder_decoder": False, "padding_value": 2, "pad_token_id": 2}
    vars(trainer).update(plain, aux_loss_enabled=False, accelerator=accelerator, **settings)
    mask = batch["labels"] != -100
    ends = torch.tensor([int(row.nonzero().max()) + 1 for row in mask])
    attention = (torch.arange(SEQ_LEN) < ends[:, None]).long()
    tensors = {"input_ids": batch["input_ids"], "attention_mask": attention, "labels": batch["labels"]}
    sides = {
        f"{side}_{name}": value[place::2]
        for place, side in enumerate(("chosen", "rejected"))
        for name, value in tensors.items()
    }
    loss, logged = trainer.get_batch_loss_metrics(resident, sides)
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in resident.named_parameters()}
    return float(loss.detach()), gradients, logged


def pairs(*, prompt: int) -> list[Judged]:
    """Make pairs of random tokens whose chosen answers are equally long."""
    generator = torch.Generator().manual_seed(4)

    def ids(number: int) -> list[int]:
        return torch.randint(3, VOCAB_SIZE, (number,), generator=generator).tolist()

    asked = [ids(prompt) for _ in range(NUM_ROWS)]
    return [Judged((one, one), (ids(5), ids(2 + n))) for n, one in enumerate(asked)]


def test_orpo_equals_trl(model: Any) -> None:
    """Where a prompt is one token: TRL learns the others of a prompt too."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental
        orpo = pytest.importorskip("trl.experimental.orpo", reason="TRL is not installed: pip install trl")
    none, examples = torch.zeros(NUM_ROWS, 2), pairs(prompt=1)
    whole = batch_of("orpo", examples, none)
    halves = [batch_of("orpo", examples[n : n + 2], none[:2]) for n in (0, 2)]
    expected = of_pairs(orpo.ORPOTrainer, model, whole, beta=0.3)
    assert {"nll_loss", "log_odds_chosen", "rewards/margins"} <= expected[2].keys()
    loss = AnswerLoss(OBJECTIVES["orpo"], PreferenceConfig(beta=0.3))
    for batches in ([whole], halves):
        assert_equal(expected, model, loss, batches, len(batches))


def test_simpo_equals_trl(model: Any) -> None:
    """With and without the chosen answer's own loss, which is CPO-SimPO."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # experimental
        cpo = pytest.importorskip("trl.experimental.cpo", reason="TRL is not installed: pip install trl")
    none, examples = torch.zeros(NUM_ROWS, 2), pairs(prompt=3)
    whole = batch_of("simpo", examples, none)
    halves = [batch_of("simpo", examples[n : n + 2], none[:2]) for n in (0, 2)]
    given = {"loss_type": "simpo", "alpha": 0.0, "label_smoothing": 0.0}
    for beta, gamma, weight in ((2.0, 0.8, 0.5), (0.1, 0.5, 0.0)):
        changes = {"beta": beta, "simpo_gamma": gamma, "cpo_alpha": weight}
        loss, gradients, logged = of_pairs(cpo.CPOTrainer, model, whole, **given, **changes)
        if not weight:
            own = of_pairs(cpo.CPOTrainer, model, whole, **given, **changes | {"cpo_alpha": 1.0})
            logged["nll_loss"] = own[2]["nll_loss"]  # which TRL does not compute then
        settings = PreferenceConfig(beta=beta, simpo_gamma=gamma, sft_weight=weight)
        ours = AnswerLoss(OBJECTIVES["simpo"], settings)
        for batches in ([whole], halves):
            assert_equal((loss, gradients, logged), model, ours, batches, len(batches), rounding=1e-6)


def test_an_answer_that_is_sure_has_finite_odds() -> None:
    chances = torch.tensor([[0.0, -3.0]], requires_grad=True)
    none = torch.zeros(1, 2)
    answers = Answers(chances, none + 3, none, none[:, 0].bool())
    (loss,), shown = OBJECTIVES["orpo"].losses(PreferenceConfig(), answers)
    loss.backward()
    assert math.isfinite(float(loss.detach()))
    assert math.isfinite(float(shown["log_odds_chosen"]))
    assert chances.grad is not None
    assert chances.grad.isfinite().all()


def test_a_smoothed_loss_by_hand() -> None:
    """Conservative DPO, which TRL's sigmoid loss leaves out."""
    none = torch.zeros(1, 2)
    settings = PreferenceConfig(beta=0.5, label_smoothing=0.1)
    answers = Answers(torch.tensor([[-1.0, -3.0]]), none + 3, none, none[:, 0].bool())
    (loss,), shown = OBJECTIVES["dpo"].losses(settings, answers)
    sigmoid = 1 / (1 + math.exp(-1))
    assert float(loss) == pytest.approx(-0.9 * math.log(sigmoid) - 0.1 * math.log(1 - sigmoid), rel=1e-6)
    assert {name: value.tolist() for name, value in shown.items()} == {
        "rewards/chosen": [-0.5],
        "rewards/rejected": [-1.5],
        "rewards/accuracies": [1.0],
    }


def test_the_other_answers_of_kto_go_round_in_groups() -> None:
    """Whole groups of 64 as they are full, and a last one that is never a single row."""
    packer = PairPacker(4, 0, borrows=True)
    examples = [Judged(((1,),), ((100 + n,),)) for n in range(129)]
    groups = [rows for one in examples for rows in packer.add(one)] + list(packer.finish())
    assert [len(rows) for rows in groups] == [64, 65]
    batch = judged_batch(groups[1])
    answers = batch["input_ids"].view(-1, 2, 4)[:, :, 1]
    assert answers[:, 0].tolist() == [*range(164, 229)]
    assert answers[:, 1].tolist() == [228, *range(164, 228)]
    assert (batch["labels"].view(-1, 2, 4)[:, 1, 1] == answers[:, 1]).all()
    assert (batch["labels"][:, [0, 2, 3]] == -100).all()
