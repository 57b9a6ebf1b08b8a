"""Holds the programs that are put beside launch files as they are; each runs without foretrain."""
