"""tunebook: a cookbook of post-training recipes for language models."""

__version__ = "0.1.0"
