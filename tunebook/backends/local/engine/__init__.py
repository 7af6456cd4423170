"""The fast path of the local backend: adapters over a frozen decoder, forward and backward by hand.

Rows stand one after the other in a stream without padding, tokens that rows share are computed
once, adapters of any number of sessions meet in one pass over the base, and nothing is computed for
frozen weights but the gradient of their input. `decoder` reads a transformers model and checks that
this path gives what the model itself gives; a model it does not know, or does not reproduce, is
trained by the general path.
"""
