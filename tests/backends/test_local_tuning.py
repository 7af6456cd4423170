"""What is computed at once follows the memory that is free; products fall back."""

import platform
import subprocess
import sys

import pytest
import torch

from tests.backends.tiny import make_lora
from tunebook.backends.local import allocator, tuning
from tunebook.backends.local.engine import products
from tunebook.backends.local.memory import free_memory


@pytest.fixture
def decoder(open_backend, tmp_path):
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    return session._engine.decoder


def test_the_bytes_of_a_token_by_hand(decoder) -> None:
    """Hidden 32, 4 heads and 2 kv heads of 8, feed-forward 64, 2 layers, float32.

    A layer keeps twice the hidden state (2 x 32), the projections (64), rotated heads and attention
    output (2 x 32), gate and up (128): 320 floats, and attention weights of 4 heads to 512 keys.
    """
    assert tuning.activation_bytes(decoder, recompute=False) == 2 * 4 * (320 + 4 * 512)
    assert tuning.activation_bytes(decoder, recompute=True) == 2 * 4 * 32


@pytest.mark.parametrize(
    ("tokens_that_fit", "expected", "recompute"),
    [(10, 256, True), (700, 700, True), (1500, 1500, False), (9000, 2048, False)],
)
def test_micro_batches_follow_the_free_memory(
    decoder, monkeypatch, tokens_that_fit, expected, recompute
) -> None:
    """From the fewest to the most tokens; less than 1,024 that fit ask for recomputation."""
    per_token = tuning.activation_bytes(decoder, recompute=False)
    free = round((tokens_that_fit + 0.5) * per_token / tuning.SHARE)
    monkeypatch.setattr(tuning, "free_memory", lambda device: free)
    assert tuning.tokens_at_once(decoder, recompute=False) == expected
    assert tuning.should_recompute(decoder) == recompute


def test_a_system_that_does_not_tell_has_enough(decoder, monkeypatch) -> None:
    monkeypatch.setattr(tuning, "free_memory", lambda device: None)
    assert tuning.tokens_at_once(decoder, recompute=False) == tuning.MOST_TOKENS["cpu"]
    assert not tuning.should_recompute(decoder)


def test_settings_win_over_the_probe(open_backend, tmp_path) -> None:
    session = open_backend(micro_batch_tokens=77, recompute=True).open_session(
        "a", make_lora(), directory=tmp_path
    )
    assert session._settings.micro_batch_tokens == 77
    assert session._engine.recompute


def test_free_memory_of_this_machine() -> None:
    free = free_memory(torch.device("cpu"))
    if platform.system() == "Linux":
        assert free is not None and 2**20 < free < 2**50


def test_freed_memory_is_kept_on_glibc_alone() -> None:
    is_glibc = platform.system() == "Linux" and platform.libc_ver()[0] == "glibc"
    assert allocator.keep_freed_memory() == is_glibc


HOLES = """
import resource
from pathlib import Path
import torch
from tunebook.backends.local.allocator import give_back_freed_memory, keep_freed_memory

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

keep_freed_memory()
tensors = [torch.ones(2**18) for _ in range(256)]  # 1 MiB each
del tensors[::2]
before = resident()
assert give_back_freed_memory()
print((before - resident()) // 2**20)
"""


@pytest.mark.skipif(not allocator.is_glibc(), reason="glibc alone keeps and gives back")
def test_holes_of_the_heap_are_given_back() -> None:
    """Of 256 MiB every second one is freed: 128 MiB, less what neighbours on a page hold."""
    ran = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True)
    assert 120 <= int(ran.stdout) <= 130


@pytest.mark.parametrize("agrees", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_and_its_gradient(monkeypatch, agrees: bool, dtype: torch.dtype) -> None:
    """By oneDNN's operator and without it: `x W^T + b`, and `y W`."""
    monkeypatch.setattr(products, "onednn_agrees", lambda: agrees and products_are_there)
    inputs, weight, bias = (
        torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        for shape in ((40, 24), (16, 24), (16,))
    )
    tolerance = 1e-5 if dtype == torch.float32 else 5e-2
    expected = inputs.double() @ weight.double().t() + bias.double()
    result = products.linear(inputs, weight, bias)
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), expected, rtol=tolerance, atol=tolerance)
    back = products.linear_backward(result, weight)
    torch.testing.assert_close(
        back.double(), result.double() @ weight.double(), rtol=tolerance, atol=10 * tolerance
    )


products_are_there = products.onednn_agrees()


def test_a_product_that_rounds_to_bfloat16_is_not_used(monkeypatch) -> None:
    """As processors with matrix tiles can be told to: 8 bits are not float32's rounding."""
    real = torch.ops.mkldnn._linear_pointwise

    class Rounding:
        @staticmethod
        def _linear_pointwise(inputs, weight, *others):
            return real(inputs.bfloat16().float(), weight.bfloat16().float(), *others)

    products.onednn_agrees.cache_clear()
    monkeypatch.setattr(products.torch, "ops", type("Ops", (), {"mkldnn": Rounding}))
    try:
        assert not products.onednn_agrees()
    finally:
        monkeypatch.undo()
        products.onednn_agrees.cache_clear()
