"""Reports on runs and sweeps: web pages that need nothing but themselves, and pictures."""
