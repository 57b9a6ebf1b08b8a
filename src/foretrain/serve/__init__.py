"""Answers requests for forecasts, plans and simulations over HTTP."""
