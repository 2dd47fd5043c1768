"""The command line: `main` runs it, and `app` has the commands, a file for each group of them."""

from megatrain.cli.commands import app, main
from megatrain.cli.settings import read_settings

__all__ = ["app", "main", "read_settings"]
