"""Measures operators, training steps and campaigns, and chooses what to measure."""
