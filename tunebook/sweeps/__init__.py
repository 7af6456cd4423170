"""Many runs as one: trained at the same time over one base, recorded and compared together."""
