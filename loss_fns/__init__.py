"""Losses: pure functions of log-probs and named columns. Imports torch and nothing else."""
