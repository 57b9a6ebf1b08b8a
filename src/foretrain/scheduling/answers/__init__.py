"""Answers questions about a cluster by playing it: when, what if, and what forecasts are worth."""
