"""Builds models of the transformers library from a configuration alone."""
