"""``python -m foretrain`` is the command ``foretrain``."""

from foretrain.cli import main

main()
