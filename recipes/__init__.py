"""Recipes: one file per algorithm, read top to bottom."""
