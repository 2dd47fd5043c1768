"""Upload of an exported model, with its card, to the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from megatrain.errors import ConfigError, OutputError

_REPO = re.compile(r"[\w.-]+/[\w.-]+")


def push(directory: Path, repo: str) -> str:
    """Upload a directory as a model; a missing repository is created, and is private.

    Args:
        directory: The directory, as `export_run` has left it.
        repo: The name of the repository, as `org/name`.

    Returns:
        The address of the model.

    Raises:
        ConfigError: `repo` is no name of a repository.
        OutputError: The hub cannot be reached, or refuses. The directory stays as it is.
    """
    if not _REPO.fullmatch(repo):
        raise ConfigError(f"--push is {repo!r}; give a repository of the hub as org/name")
    from huggingface_hub import HfApi, constants

    later = f"the model is in {directory}; send it later with: hf upload {repo} {directory}"
    if constants.HF_HUB_OFFLINE:
        raise OutputError(f"HF_HUB_OFFLINE is set, so nothing is sent to the hub; {later}")
    try:
        hub = HfApi()
        made = hub.create_repo(repo, private=True, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=directory, commit_message="megatrain export")
    except Exception as error:  # the hub's client and its transport raise many classes
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise OutputError(f"the hub has not taken {repo}: {reason}; {later}") from error
    return str(made)
