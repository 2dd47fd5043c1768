"""Names on the Hugging Face hub: the form of a name, and requests that do not wait long.

A mistyped path is no name of the hub, and is never requested. For a name the hub is tried once. If it does
not answer, libraries are told to use only their caches, since each would go on trying for half a minute.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest import mock

from megatrain.errors import MegatrainError, ModelError, first_line

_WAIT_S = 5.0
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def may_be_on_hub(name: str | Path) -> bool:
    """Return whether the hub may be asked for a name, which is not so if it can only be a path.

    A name is `name` or `org/name`, with nothing of that name here, and with no directory `org`.
    """
    if isinstance(name, Path) or not _NAME.fullmatch(name):
        return False
    return not Path(name).exists() and not ("/" in name and Path(name.partition("/")[0]).exists())


def no_directory(name: str | Path) -> str:
    """Return the sentence that a path is no model directory, and that the hub has no such name."""
    return f"{name} is not a directory; give a model directory or a hub id such as org/name"


def refuse_link_out(file: Path) -> None:
    """Refuse a link in a model directory that leads out of it: what is read there is exported and shared.

    A link inside the directory is fine, and so are those of the hub's cache, from `snapshots` to `blobs`.

    Raises:
        ModelError: The file is another link.
        OSError: The file cannot be looked at.
    """
    if not file.is_symlink():
        return
    target, root = file.resolve(), file.parent.resolve()
    is_of_cache = root.parent.name == "snapshots" and target.is_relative_to(root.parent.parent / "blobs")
    if not is_of_cache and not target.is_relative_to(root):
        raise ModelError(f"{file} is a link to a file outside the model directory; copy the file there")


@contextmanager
def asking_hub(name: str, what: str, kind: type[MegatrainError] = ModelError) -> Iterator[None]:
    """Let a library ask the hub for something, or only its cache where the hub does not answer.

    Args:
        name: The name of the repository.
        what: The wanted part of it, in the words of a sentence: `its tokenizer`.
        kind: The class of the error.

    Raises:
        MegatrainError: An error of `kind`: the part is not there, or the hub was not reached.
    """
    from huggingface_hub import constants

    is_off = constants.HF_HUB_OFFLINE
    is_reached = not is_off and is_hub_reached()
    try:
        with ExitStack() as stack:
            if not is_reached:
                stack.enter_context(mock.patch.object(constants, "HF_HUB_OFFLINE", True))
                if "datasets" in sys.modules:
                    config = sys.modules["datasets"].config
                    stack.enter_context(mock.patch.object(config, "HF_HUB_OFFLINE", True))
            yield
    except MegatrainError:
        raise
    except Exception as error:  # the hub's client and its transport raise many classes
        why = f"; check the spelling: {first_line(error)}"
        if not is_reached:
            why = ", which is not asked (HF_HUB_OFFLINE)" if is_off else ", which was not reached"
            why += "; check the spelling and the connection"
        raise kind(
            f"{name} is no local directory, and {what} cannot be read from the Hugging Face hub{why}"
        ) from error


@cache
def is_hub_reached() -> bool:
    """Return whether the hub, or its stand-in, answers within five seconds; it is asked once per process."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    answered = threading.Event()

    def ask() -> None:
        try:
            get_session().head(constants.ENDPOINT, timeout=_WAIT_S)
        except Exception:  # any error means that it was not reached
            return
        answered.set()

    # It runs in a thread, since the resolution of a name has no time limit.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_WAIT_S)
    return answered.is_set()
