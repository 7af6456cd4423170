"""Together AI's post-training service."""
