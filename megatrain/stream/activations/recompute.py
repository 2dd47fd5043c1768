"""Recomputes a call: what autograd saves in it is dropped, and made again when the first of it is needed.

This does what torch's non-reentrant checkpoint does, in far fewer calls: a saved tensor costs one short
function when it is dropped, one when it is made again, and one when it is found. The second run has the first
one's random state and autocast, must save tensors of the same shapes in the same order, and ends as soon as
the last of them is there.

Source: `torch.utils.checkpoint`, whose rules for saved tensors these are.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megatrain.errors import ModelError
from megatrain.model.torch_state import Autocast, RandomState

Contexts: TypeAlias = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]
Arguments: TypeAlias = tuple[Any, ...]


class _AllThere(BaseException):
    """Ends a second run, of which nothing more is needed. No model may take it for an error of its own."""


class _Dropped:
    """What autograd keeps in place of a saved tensor; with it goes the tensor that was made again."""

    tensor: Tensor | None = None


class Recomputation:
    """One call: its first run, and its second."""

    def __init__(
        self,
        name: str,
        run: Callable[..., Any],
        device: torch.device,
        *,
        bring: Callable[[], Arguments] | None = None,
        contexts: Contexts | None = None,
        note_saved: Callable[[Tensor], None] | None = None,
    ) -> None:
        """Prepare a call of `run`.

        Args:
            name: The name of what is called, for messages.
            run: The function that runs twice, and leaves its arguments as they are.
            device: The device from whose generator it may draw, beside the CPU's.
            bring: The function that returns the arguments by position for the second run; None: those of the
                first are kept.
            contexts: The contexts in which it runs, and in which it runs again.
            note_saved: The function that is told of each tensor that autograd saves in the first run.
        """
        self._name = name
        self._run = run
        self._device = device
        self._bring = bring
        self._contexts: Contexts = contexts or (nullcontext(), nullcontext())
        self._note_saved = note_saved
        self._dropped: list[tuple[weakref.ref[_Dropped], torch.Size, torch.dtype]] = []
        self._num_made = 0
        self._is_first_run = False
        self._is_over = False

    @contextmanager
    def first_run(self, args: Arguments, kwargs: dict[str, Any]) -> Iterator[None]:
        """Take note of the arguments of the first run, which the caller makes within this context."""
        self._random, self._autocast = RandomState(self._device), Autocast(self._device)
        self._args = args if self._bring is None else ()
        self._versions = _versions(self._args)
        self._kwargs = kwargs
        self._is_first_run = True
        try:
            with saved_tensors_hooks(self._drop, self._find), self._contexts[0]:
                yield
        finally:
            self._is_first_run = False

    def _drop(self, tensor: Tensor) -> _Dropped:
        if self._note_saved is not None:
            self._note_saved(tensor)
        dropped = _Dropped()
        self._dropped.append((weakref.ref(dropped), tensor.shape, tensor.dtype))
        return dropped

    def _find(self, dropped: _Dropped) -> Tensor:
        if self._is_first_run:
            raise ModelError(
                f"{self._name} takes gradients within its own forward, before its activations can be "
                "recomputed; use activations=keep if no weight takes part in them"
            )
        if not self._is_over:
            self._is_over = True
            self._run_again()
        tensor, dropped.tensor = dropped.tensor, None
        if tensor is None:
            raise ModelError(
                f"a second backward through the same forward of block {self._name}, whose activations were "
                "recomputed for the first one: run the forward again; or a function of its own reads "
                "ctx.saved_tensors twice in one backward: read it once"
            )
        return tensor

    def _run_again(self) -> None:
        if _versions(self._args) != self._versions:
            raise ModelError(
                f"an input of {self._name} was changed in place after its forward, so its activations cannot "
                "be recomputed; use activations=keep"
            )
        args = self._args if self._bring is None else self._bring()
        kwargs, self._args, self._kwargs, self._bring = self._kwargs, (), {}, None
        held = RandomState(self._device)
        self._random.restore()
        try:
            with (
                self._autocast.again(),
                self._contexts[1],
                saved_tensors_hooks(self._make, _as_it_is),
                torch.enable_grad(),
            ):
                self._run(*args, **kwargs)
        except _AllThere:
            return
        finally:
            held.restore()
        raise self._differs("it saves fewer tensors for the backward")

    def _make(self, tensor: Tensor) -> Tensor:
        """Take a tensor that the second run saves for the one that the first run saved in its place."""
        reference, shape, dtype = self._dropped[self._num_made]
        if tensor.shape != shape or tensor.dtype is not dtype:
            raise self._differs(
                f"it saves {tuple(tensor.shape)} of {tensor.dtype} where it saved {tuple(shape)} of {dtype}"
            )
        tensor = tensor.detach()  # the graph of the second run is dropped
        dropped = reference()
        if dropped is not None:
            dropped.tensor = tensor
        self._num_made += 1
        if self._num_made == len(self._dropped):
            raise _AllThere
        return tensor

    def _differs(self, how: str) -> ModelError:
        return ModelError(
            f"{self._name} does not compute the same twice: in its recomputation {how} (does it keep state "
            "between calls?); use activations=keep"
        )


def _versions(args: Arguments) -> list[int]:
    return [value._version for value in args if isinstance(value, Tensor)]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor
