"""Traces one rank of a job under tensor, context and expert parallelism, by distinct layers."""
