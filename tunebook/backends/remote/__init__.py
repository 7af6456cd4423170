"""What the backends of all services share: queues, losses in two passes, sessions."""
