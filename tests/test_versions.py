"""Versions of what is installed, and of what is not."""

from importlib import metadata
from unittest import mock

import megatrain
from megatrain.train.records.directory import environment
from megatrain.versions import versions_of


def test_a_package_that_is_not_installed_has_no_version() -> None:
    found = versions_of(("torch", "no-such-package", "megatrain"))
    expected = {
        "torch": metadata.version("torch"),
        "no-such-package": "none",
        "megatrain": megatrain.__version__,
    }
    assert found == expected


def test_a_run_from_the_source_folder_says_its_version() -> None:
    with mock.patch.object(metadata, "version", side_effect=metadata.PackageNotFoundError("megatrain")):
        found = environment()["versions"]
    assert (found["megatrain"], found["datasets"]) == (megatrain.__version__, "none")
