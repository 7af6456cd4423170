"""Hydra values: one primary file per recipe, one folder per group."""
