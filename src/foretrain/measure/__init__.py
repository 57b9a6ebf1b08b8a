"""Making data: operators, training steps and campaigns are measured, and what to measure is chosen."""
