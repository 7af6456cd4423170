"""An HTTP server that speaks Together's post-training protocol over the local backend."""
