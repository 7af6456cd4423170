"""Weights laid out for decoding give what the plain ones give."""

import pytest
import torch

from tests.backends.engine.families import FAMILIES, write_family
from tests.backends.engine.test_engine import spread
from tests.backends.tiny import make_lora, make_sampling
from tunebook.backends.local.engine import batching, packed
from tunebook.backends.local.engine.products import onednn_agrees
from tunebook.errors import NonFiniteError
from tunebook.types import Datum

PROMPTS = [[5, 9, 33, 8, 21], [40, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 22]]


def test_the_operators_are_there() -> None:
    """They are torch's own, of a build with oneDNN; without them decoding takes longer."""
    assert onednn_agrees() == torch.backends.mkldnn.is_available()


def sampled(session, num_samples, **settings):
    generator = session.publish_weights().result()
    params = make_sampling(**{"max_tokens": 30, **settings})
    return [
        completion
        for completions in generator.sample(PROMPTS, params, num_samples).result()
        for completion in completions
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_logprobs_are_the_same(open_backend, tmp_path, monkeypatch, family) -> None:
    """With the adapter in the weights, and apart from them; `forward` agrees (1e-4)."""
    folder = write_family(tmp_path / "model", family)
    session = open_backend(model=folder).open_session("a", make_lora(), directory=tmp_path)
    spread(session)
    calls = []
    real = packed.pack
    monkeypatch.setattr(batching, "pack", lambda *given: (calls.append(1), real(*given))[1])
    plain = sampled(session, 3)
    assert calls == []
    monkeypatch.setattr(batching, "MIN_TOKENS", 1)
    laid_out = sampled(session, 3)
    assert calls == ([1] if onednn_agrees() else [])
    for ours, theirs in zip(laid_out, plain, strict=True):
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        torch.testing.assert_close(
            torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-4
        )
    prompt, completion = PROMPTS[0], laid_out[0]
    row = Datum(torch.tensor([*prompt, *completion.tokens]).int().numpy())
    scored = session.forward([row]).result()[0][len(prompt) - 1 :]
    torch.testing.assert_close(scored, torch.tensor(completion.logprobs), rtol=0, atol=1e-4)


def test_bfloat16_keeps_the_adapter_apart(open_backend, tmp_path, monkeypatch) -> None:
    """Added to bfloat16 weights, most of a small adapter would be rounded away."""
    session = open_backend(dtype="bfloat16").open_session("a", make_lora(), directory=tmp_path)
    spread(session)
    engine = session._engine
    if not packed.can_pack(engine.decoder, engine.head_weight):
        pytest.skip("this processor has no bfloat16 products")
    adapter = session._weights.applied_to(engine.decoder)
    assert packed.pack(engine.decoder, engine.head_weight, adapter).adapter is adapter
    monkeypatch.setattr(batching, "MIN_TOKENS", 1)
    assert len(sampled(session, 3)) == 9


def test_a_request_goes_the_same_way_whatever_is_beside_it(open_backend, tmp_path) -> None:
    """Two sessions, a large and a small request: the tokens and the bits that each gets alone."""
    results = []
    for names in (("large", "small"), ("large",), ("small",)):
        backend = open_backend()
        sessions = {
            name: backend.open_session(name, make_lora(seed=len(name)), directory=tmp_path)
            for name in names
        }
        futures = {}
        for name, session in sessions.items():
            spread(session, seed=len(name))
            generator = session.publish_weights().result()
            params = make_sampling(max_tokens=40)
            futures[name] = generator.sample(PROMPTS, params, 6 if name == "large" else 2)
        results.append({name: future.result() for name, future in futures.items()})
    for alone in results[1:]:
        for name, completions in alone.items():
            for ours, theirs in zip(completions, results[0][name], strict=True):
                for one, other in zip(ours, theirs, strict=True):
                    assert one.tokens.tolist() == other.tokens.tolist()
                    assert one.logprobs.tolist() == pytest.approx(other.logprobs.tolist(), abs=1e-6)


def test_damaged_weights_concern_their_owner_alone(open_backend, tmp_path) -> None:
    """NaN logits of one session: it is told; another in the same run samples what it does alone."""
    results = []
    for damaged in (True, False):
        backend = open_backend()
        good = backend.open_session("good", make_lora(), directory=tmp_path)
        bad = backend.open_session("bad", make_lora(seed=1), directory=tmp_path)
        for session in (good, bad):
            spread(session)
        if damaged:
            with torch.no_grad():
                for parameter in bad._weights.parameters.values():
                    parameter.mul_(1e20)
        generators = [session.publish_weights().result() for session in (bad, good)]
        futures = [each.sample(PROMPTS, make_sampling(), 2) for each in generators]
        if damaged:
            with pytest.raises(NonFiniteError, match="logits are NaN or infinite"):
                futures[0].result()
        results.append([[c.tokens.tolist() for c in row] for row in futures[1].result()])
    assert results[0] == results[1]
