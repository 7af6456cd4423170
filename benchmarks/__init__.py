"""Benchmarks: the local backend against TRL and PEFT, on the same tokens and from the same adapter.

`make bench`, or `python -m benchmarks sft dpo --help`. Contestants are processes that compute in
turn, and a ratio is only reported where loss and adapter gradient of a step agree.
"""
