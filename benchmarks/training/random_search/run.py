"""Plays a run of drawn settings, streamed and resident, and holds one against the other after every event.

What must be equal is equal bit by bit: losses, gradients, masters, logits, generated tokens, saved weights.
Two settings change bits by what the documentation says, `head_chunk_tokens` and moments in fewer bytes: there
the reference is the engine under the plainest choice, whose losses are held against the resident model's.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.training.random_search.families import VOCAB_SIZE, config_of
from benchmarks.training.random_search.oracle import (
    IGNORED,
    Batch,
    Oracle,
    as_resident,
    evaluated,
    generated,
)
from benchmarks.training.random_search.settings import Settings
from benchmarks.training.random_search.streamed import Streamed, losses_of
from megatrain.errors import MegatrainError, TornStateError

LOSS_TOLERANCE = {"fp32": 1e-3, "bf16": 5e-2}
"""Relative, of losses under settings that change bits: AdamW's first steps depend on signs of gradients."""
MOMENTS_TOLERANCE = 1e-2
"""The least, where moments are kept in fewer bytes."""


class Differs(Exception):
    """Something is not what it is without streaming."""


class RefusedLate(Exception):
    """An event of a run that had begun was refused."""


class Refused(Exception):
    """The settings were refused as a whole, in a sentence."""


class NoModel(Exception):
    """There is no such model: transformers or PEFT cannot build it, or run it, by themselves."""


class Stop(Exception):
    """Thrown by a hook."""


def play(settings: Settings, directory: Path) -> Counter[str]:
    """Play a run; returns how often each kind of event was played.

    Raises:
        NoModel: Nobody can run the model.
        Refused: The engine refuses the settings as a whole.
        Differs: Something differs.
        RefusedLate: A step was refused, in a sentence.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of transformers and PEFT, about models that are not usual
        return Run(settings, directory).play()


class Run:
    """Both sides of one run."""

    def __init__(self, settings: Settings, directory: Path) -> None:
        """Make the model, its resident copy, and the engine."""
        self._settings = settings
        self._directory = directory
        self._max_grad_norm: float | None = settings["adamw"]["max_grad_norm"]
        self._counts: Counter[str] = Counter()
        self._is_exact = settings["head_chunk_tokens"] is None and settings["moments"] == "fp32"
        adamw = {name: value for name, value in settings["adamw"].items() if name != "max_grad_norm"}
        try:
            model = make_model(settings)
            self.oracle = Oracle(
                model, precision=settings["precision"], num_runs=settings["num_runs"], adamw=adamw
            )
        except Exception as error:  # of each library in its own way
            raise NoModel(f"{type(error).__name__}: {error}") from error
        try:
            self.streamed = Streamed(model, settings, directory)
            self.plain = None
            if not self._is_exact:
                self.plain = Streamed(make_model(settings), settings, directory, is_plain=True)
        except MegatrainError as error:
            raise Refused(str(error)) from error

    def play(self) -> Counter[str]:
        """Play all events, and compare what is left."""
        for event in self._settings["events"]:
            kind = event["do"]
            with _said(kind):
                was_played = getattr(self, f"_{kind}")(event)
            self._counts[kind if was_played else f"{kind}, not possible there"] += 1
            if self._is_torn():
                self._counts["torn by an exception after immediate updates"] += 1
                return self._counts
        self._compare_masters("at the end")
        self.streamed.engine.detach()
        self._compare_weights(dict(self.streamed.model.named_parameters()))
        return self._counts

    # -- steps ----------------------------------------------------------------------------------------------

    def _step(self, event: Settings) -> bool:
        how, batches, seeds = self._data(event)
        loss = self.streamed.backward(how, batches, seeds)
        self._finish(event, loss, how, batches, seeds)
        return True

    def _throw(self, event: Settings) -> bool:
        """Let a hook throw in a step, which is dropped; one whose hook is not called so often is a step."""
        how, batches, seeds = self._data(event)
        calls = iter(range(1, 1000))

        def hook(*_: Any) -> None:
            if next(calls) == event["call"]:
                raise Stop

        handles = [getattr(_module_at(self.streamed.model, event), event["hook"])(hook)]
        try:
            loss = self.streamed.backward(how, batches, seeds)
            for side in (self.oracle, self.plain):  # a hook of a backward is in the graph, and changes bits
                if side is not None:
                    handles.append(getattr(_module_at(side.model, event), event["hook"])(lambda *_: None))
            self._finish(event, loss, how, batches, seeds)
        except Stop:
            if not self._is_torn():
                self.streamed.optimizer.zero_grad()
            return True
        finally:
            for handle in handles:
                handle.remove()
        return False

    def _finish(
        self, event: Settings, loss: Tensor, how: str, batches: list[Batch], seeds: list[int]
    ) -> None:
        """Compare what a backward has left, update, and compare that."""
        resident = self._backward_of_oracle(how, batches, seeds)
        if self.plain is None:
            self._compare(loss, resident, "loss")
        else:
            self._compare(loss, self.plain.backward(how, batches, seeds), "loss")
            tolerance = LOSS_TOLERANCE[self._settings["precision"]]
            if self._settings["moments"] != "fp32":
                tolerance = max(tolerance, MOMENTS_TOLERANCE)
            if not math.isclose(loss, resident, rel_tol=tolerance):
                raise Differs(f"loss is {float(loss)}, and {float(resident)} of the resident model")
        if event["reads"] and self.streamed.engine.choice.updates != "immediate":
            self._compare_gradients()
        norm = self.streamed.optimizer.step().grad_norm
        if self.plain is not None:
            wanted = self.plain.optimizer.step().grad_norm
            if norm != wanted:
                raise Differs(f"norm is {norm}, not {wanted}")
        elif not math.isclose(norm, self.oracle.norm(), rel_tol=1e-6, abs_tol=1e-30):
            raise Differs(f"norm is {norm}, not {self.oracle.norm()}")
        self.oracle.update(norm, self._max_grad_norm)
        if event["compares"]:
            self._compare_masters("after the step")

    def _backward_of_oracle(self, how: str, batches: list[Batch], seeds: list[int]) -> Tensor:
        batches = list(map(as_resident, batches))
        if how in ("engine", "split"):
            return self.oracle.step_of_model(batches, seeds)
        return self.oracle.run(losses_of(self.oracle.model, batches), seeds)

    def _infinite(self, event: Settings) -> bool:
        """Take a step whose gradients are infinite: it changes nothing."""
        if self.streamed.engine.choice.updates == "immediate" or self._settings["num_runs"] > 1:
            return False
        _, batches, _ = self._data({**event, "how": "hand"})
        (self.streamed.model(**batches[0]).loss * math.inf).backward()
        if not self.streamed.optimizer.step().skipped:
            raise Differs("a step with infinite gradients was not skipped")
        self._compare_masters("after a step that was skipped")
        return True

    def _zero_grad(self, event: Settings) -> bool:
        """Drop a step's gradients."""
        if self.streamed.engine.choice.updates == "immediate":
            return False
        _, batches, seeds = self._data({**event, "how": "engine"})
        self.streamed.backward("engine", batches, seeds)
        self.streamed.optimizer.zero_grad()
        return True

    # -- between steps --------------------------------------------------------------------------------------

    def _lr(self, event: Settings) -> bool:
        for side in (self.streamed, self.plain, self.oracle):
            if side is not None:
                side.set_lr(event["value"])
        return True

    def _freeze(self, event: Settings) -> bool:
        """Freeze parameters after attach, or train them again; what was frozen before stays so."""
        names = {name for name in self.oracle.masters if event["part"] in name}
        trained = {name for name in self.oracle.masters if self.oracle.parameters[name].requires_grad}
        if not names or (not event["value"] and trained <= names):
            return False
        for side in (self.streamed, self.plain, self.oracle):
            for name, parameter in () if side is None else side.model.named_parameters():
                if name in names:
                    parameter.requires_grad_(event["value"])
        return True

    def _evaluate(self, _: Settings) -> bool:
        batches = self._data({"data": 60, "how": "engine"})[1]
        wanted = self._expected(evaluated, as_resident(batches[0]))
        self._compare(evaluated(self.streamed.model, batches[0]), wanted, "logits")
        return True

    def _generate(self, _: Settings) -> bool:
        ids = torch.randint(3, VOCAB_SIZE, (2, 5), generator=torch.Generator().manual_seed(7))
        try:
            wanted = self._expected(generated, ids)
        except Exception:  # of models that cannot generate, resident ones too
            return False
        found = generated(self.streamed.model, ids)
        if found.tolist() != wanted.tolist():
            raise Differs(f"it generated {found[:, 5:].tolist()}, not {wanted[:, 5:].tolist()}")
        return True

    def _state_dict(self, _: Settings) -> bool:
        self._compare_weights(self.streamed.model.state_dict())
        return True

    def _reconfigure(self, event: Settings) -> bool:
        try:
            self.streamed.reconfigure(event["choice"])
        except MegatrainError:
            return False
        return True

    def _reattach(self, event: Settings) -> bool:
        """Go on with another engine and a new optimizer."""
        loses = self._settings["precision"] == "bf16" and self.streamed.tiers is not None
        if event["by_reattach"]:
            if self._settings["device"] == "emulated":  # lanes of the caller's
                return False
            self.streamed.attach_again()
        else:
            self.streamed.engine.detach()
            self._compare_weights(dict(self.streamed.model.named_parameters()))
            try:
                self.streamed.attach(event["choice"], event["tiers"])
            except MegatrainError:
                self.streamed.attach(self._settings["choice"], self._settings["tiers"])
        self._begin_again(keeps_masters=not loses)
        return True

    def _save_load(self, _: Settings) -> bool:
        """Save the model as transformers does, load it anew, and go on with a new optimizer."""
        if self._settings["lora"] is not None:
            return False
        place = self._directory / f"saved{sum(self._counts.values())}"
        self.streamed.model.save_pretrained(place)
        try:
            self.streamed.load(place)
        except MegatrainError as error:
            raise Refused(str(error)) from error
        self._begin_again(keeps_masters=self._settings["precision"] == "fp32")
        return True

    def _begin_again(self, *, keeps_masters: bool) -> None:
        self.oracle.begin_again(keeps_masters=keeps_masters)
        if self.plain is not None:
            self.plain.engine.detach()
            if not keeps_masters:
                self.plain.model.__dict__.pop("_megatrain_host")
            self.plain.attach({}, None)

    # -- comparisons ----------------------------------------------------------------------------------------

    def _compare(self, found: Tensor, wanted: Tensor, what: str) -> None:
        if found.dtype != wanted.dtype or found.shape != wanted.shape:
            raise Differs(
                f"{what} is {found.dtype} {list(found.shape)}, not {wanted.dtype} {list(wanted.shape)}"
            )
        if not torch.equal(found, wanted):
            wrong = ~((found == wanted) | (found.isnan() & wanted.isnan()))
            if not wrong.any():
                return
            most = (found.double() - wanted.double()).abs().max().item()
            raise Differs(f"{what}: {int(wrong.sum())} of {found.numel()} differ, by up to {most:.3g}")

    def _compare_gradients(self) -> None:
        wanted = self.oracle.gradients
        if self.plain is not None:
            wanted = dict(self.plain.engine.named_gradients())
        found = dict(self.streamed.engine.named_gradients())
        if lacking := sorted(found.keys() ^ wanted.keys()):
            raise Differs(f"{len(lacking)} gradients are on one side only, such as that of {lacking[0]}")
        for name, gradient in found.items():
            self._compare(gradient, wanted[name], f"gradient of {name}")

    def _compare_masters(self, when: str) -> None:
        wanted = {name: self.oracle.master(name) for name in self.oracle.masters}
        if self.plain is not None:
            wanted = dict(self.plain.engine.named_masters())
        for name, master in self.streamed.engine.named_masters():
            if name in wanted:
                self._compare(master, wanted[name], f"master of {name} {when}")

    def _compare_weights(self, found: Mapping[str, Tensor]) -> None:
        model = self.oracle.model
        if self.plain is not None:
            self.plain.engine.sync()
            model = self.plain.model
        for name, parameter in model.named_parameters():
            self._compare(found[name].detach(), parameter.detach(), f"weight {name}")

    def _expected(self, function: Any, argument: Any) -> Tensor:
        found: Tensor = function((self.oracle if self.plain is None else self.plain).model, argument)
        return found

    # -- data -----------------------------------------------------------------------------------------------

    def _data(self, event: Settings) -> tuple[str, list[Batch], list[int]]:
        """Return how a step is taken, its micro-batches and their seeds."""
        settings, how = self._settings, event["how"]
        unequal = len({*settings["data"]["tokens"]}) > 1
        if how == "split" and (unequal or self.oracle.is_random or settings["lora"] is not None):
            how = "hand"  # rows of one length; and the engine draws a seed for each piece
        if how == "hand" and self.streamed.engine.choice.updates == "immediate":
            how = "engine"  # a backward uses gradients up, so a second one is refused
        batches = make_batches(settings["data"], settings["num_micro_batches"], event["data"])
        return how, batches, [1000 * event["data"] + number for number in range(len(batches))]

    def _is_torn(self) -> bool:
        try:
            self.streamed.engine.require_attached()
        except TornStateError:
            if self.streamed.engine.choice.updates != "immediate":
                raise
            return True
        return False


@contextmanager
def _said(kind: str) -> Any:
    """Say in which event an error was found, and which of them is a refusal."""
    try:
        yield
    except (Refused, Differs) as error:
        raise type(error)(f"{kind}: {error}") from error
    except MegatrainError as error:
        raise RefusedLate(f"{kind}: {type(error).__name__}: {error}") from error


def make_model(settings: Settings) -> PreTrainedModel:
    """Build a random model in fp32, its norms and biases moved off their defaults, with adapters if drawn."""
    torch.manual_seed(settings["seed"])
    config = config_of(settings["family"], dropout=settings["dropout"])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.02 * torch.randn(parameter.shape))
    if settings["lora"] is not None:
        from peft import LoraConfig, get_peft_model

        lora = LoraConfig(**settings["lora"], task_type="CAUSAL_LM", init_lora_weights=False)
        model = get_peft_model(model, lora)
    for name, parameter in model.named_parameters():
        if any(part in name for part in settings["frozen"]):
            parameter.requires_grad_(False)
    return model.train()


def make_batches(data: Settings, number: int, seed: int) -> list[Batch]:
    """Make random micro-batches: plain, padded behind, or with two documents in a row."""
    generator = torch.Generator().manual_seed(1000 + seed)
    batches: list[Batch] = []
    for place in range(number):
        tokens = data["tokens"][place % len(data["tokens"])]
        ids = torch.randint(3, VOCAB_SIZE, (data["rows"], tokens), generator=generator)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if data["kind"] == "padded":
            mask = torch.ones_like(ids)
            for row in range(data["rows"]):
                mask[row, tokens - 1 - row :] = 0
            batch |= {"attention_mask": mask, "labels": ids.masked_fill(mask == 0, IGNORED)}
        if data["kind"] == "packed":
            cut = tokens // 2
            positions = torch.cat([torch.arange(cut), torch.arange(tokens - cut)])
            batch["position_ids"] = positions.repeat(data["rows"], 1)
            batch["labels"][:, cut] = IGNORED
        batches.append(batch)
    return batches


def _module_at(model: PreTrainedModel, event: Settings) -> nn.Module:
    """Return the module on which a hook is to throw."""
    inside = model.get_base_model() if hasattr(model, "get_base_model") else model
    layers = max((m for m in inside.modules() if isinstance(m, nn.ModuleList)), key=_num_parameters)
    layer = layers[event["layer"]]
    leaves = [module for module in layer.modules() if not [*module.children()] and [*module.parameters()]]
    outside = [m for m in inside.modules() if not [*m.children()] and [*m.parameters(recurse=False)]]
    norms = [module for module in outside if "norm" in type(module).__name__.lower()]
    found: dict[str, nn.Module] = {
        "layer": layer,
        "first leaf": leaves[0],
        "last leaf": leaves[-1],
        "norm": norms[-1] if norms else leaves[0],
        "head": inside.get_output_embeddings() or layer,
        "embedding": inside.get_input_embeddings(),
    }
    return found[event["place"]]


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
