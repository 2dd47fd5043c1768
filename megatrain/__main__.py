"""Lets `python -m megatrain` be the command `megatrain`."""

from megatrain.cli import main

if __name__ == "__main__":
    main()
