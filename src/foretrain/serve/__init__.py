"""Answers jobs as a service does."""
