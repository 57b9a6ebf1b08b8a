"""Runs the command ``foretrain`` as ``python -m foretrain``."""

from foretrain.cli import main

main()
