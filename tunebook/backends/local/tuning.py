"""How much to compute at once, from the memory that is there and the model's size.

On a CPU each pass over the weights costs a fixed time besides that for its tokens, so larger
micro-batches are faster until their activations no longer fit.
"""

from tunebook.backends.local.engine.attention import KEPT_KEYS
from tunebook.backends.local.engine.decoder import Decoder, Site
from tunebook.backends.local.memory import free_memory

MOST_TOKENS = {"cpu": 2048, "cuda": 16384, "mps": 4096}
"""On a CPU twice as many gain a few percent at most; the others have not been measured."""
FEWEST_TOKENS = 256
SHARE = 0.4
"""Of the free memory that activations may take."""


def tokens_at_once(decoder: Decoder, *, recompute: bool) -> int:
    """Tokens of a micro-batch whose activations fit into the memory that is free.

    Args:
        decoder: on its device.
        recompute: whether layers keep only their input.
    """
    free = free_memory(decoder.device)
    most = MOST_TOKENS[decoder.device.type]
    if free is None:
        return most
    fitting = int(SHARE * free / activation_bytes(decoder, recompute=recompute))
    return max(FEWEST_TOKENS, min(most, fitting))


def should_recompute(decoder: Decoder) -> bool:
    """Whether memory is too short to keep the activations of even a small micro-batch."""
    free = free_memory(decoder.device)
    if free is None:
        return False
    return SHARE * free < FEWEST_TOKENS * 4 * activation_bytes(decoder, recompute=False)


def activation_bytes(decoder: Decoder, *, recompute: bool) -> int:
    """Bytes that a token's activations take until the backward pass, attention weights included."""
    hidden = decoder.hidden_size
    if recompute:
        return 4 * hidden * len(decoder.layers)
    layer = decoder.layers[0]
    projected = len(layer.sites[Site.QKV].weight)
    query_width = decoder.num_heads * decoder.head_dim
    values = projected + 2 * query_width + len(layer.sites[Site.GATE_UP].weight)
    weights = decoder.num_heads * KEPT_KEYS // 2 * 4 if decoder.device.type == "cpu" else 0
    return len(decoder.layers) * (2 * 4 * hidden + values * decoder.dtype.itemsize + weights)
