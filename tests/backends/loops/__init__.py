"""Tests of backend=baseten: the service's own SDK against a server that computes here.

They need the extra `baseten`, and so Python 3.12: `make test-loops`.
"""
