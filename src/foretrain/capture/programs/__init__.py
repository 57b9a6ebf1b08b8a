"""Traces whole training steps as users write them: scripts, step functions, Lightning modules, Trainers."""
