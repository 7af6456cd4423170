"""What is said to vLLM and made of its answers. vLLM itself is not run here: it needs a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from loss_fns.cross_entropy import cross_entropy
from tests.backends.tiny import make_adam, make_data, make_lora, make_sampling
from tunebook.backends.local import LocalBackend, vllm_generator
from tunebook.backends.local.vllm_generator import (
    AdapterPublisher,
    VllmEngine,
    check_generator,
    check_publishable,
    completion_of,
    engine_settings,
    rank_limit,
    row_seed,
    sampling_settings,
)
from tunebook.errors import BackendError, ConfigError, StaleGenerator
from tunebook.types import StopReason


def checked(**changes) -> None:
    values = {
        "generator": "vllm",
        "device": torch.device("cuda"),
        "base_weights": "full",
        "memory": 0.4,
        "max_seq_len": None,
    }
    check_generator(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"generator": "sglang"}, "backend.generator=sglang: must be one of torch, vllm"),
        ({"memory": 1.0}, "backend.generator_memory=1.0: must be above 0 and below 1"),
        ({"max_seq_len": 1}, "backend.generator_max_seq_len=1: must be at least 2, or null"),
        (
            {"device": torch.device("cpu")},
            "backend.generator=vllm: needs a CUDA device, this backend computes on cpu; use "
            "backend.generator=torch",
        ),
        (
            {"device": torch.device("cuda:2")},
            "backend.generator=vllm: runs on the first CUDA device that it sees, this backend "
            "computes on cuda:2; set CUDA_VISIBLE_DEVICES=2 and backend.device=cuda",
        ),
        (
            {"base_weights": "nf4"},
            "backend.generator=vllm: samples over the full base, with backend.base_weights=nf4 an "
            "adapter is trained over another; use backend.generator=torch or "
            "backend.base_weights=full",
        ),
    ],
)
def test_what_cannot_sample_is_refused(monkeypatch, changes, message) -> None:
    monkeypatch.setattr(vllm_generator.importlib.util, "find_spec", lambda _name: object())
    checked()
    with pytest.raises(ConfigError) as caught:
        checked(**changes)
    assert str(caught.value) == message


def test_it_is_refused_where_it_is_not_installed(monkeypatch) -> None:
    monkeypatch.setattr(vllm_generator.importlib.util, "find_spec", lambda _name: None)
    checked(generator="torch")
    with pytest.raises(ConfigError) as caught:
        checked()
    assert str(caught.value) == (
        "backend.generator=vllm: vLLM is not installed; `pip install 'tunebook[vllm]'`, or use "
        "backend.generator=torch"
    )


def test_a_backend_refuses_it_when_it_is_made(tiny) -> None:
    with pytest.raises(ConfigError, match=r"backend\.generator=vllm: needs a CUDA device"):
        LocalBackend(model=tiny.untied, device="cpu", generator="vllm")


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (
            None,
            "backend.generator=vllm: takes over adapters only, and lora=null trains all weights; "
            "set lora, or use backend.generator=torch",
        ),
        (
            make_lora(rank=513),
            "lora.rank=513: backend.generator=vllm takes ranks up to 512; lower it, or use "
            "backend.generator=torch",
        ),
    ],
)
def test_what_vllm_cannot_take_over_is_refused(open_backend, tmp_path, lora, message) -> None:
    check_publishable("torch", lora)
    check_publishable("vllm", make_lora())
    backend = open_backend()
    backend._generator = "vllm"
    for begin in (
        lambda: backend.check(lora, None),
        lambda: backend.open_session("a", lora, directory=tmp_path),
    ):
        with pytest.raises(ConfigError) as caught:
            begin()
        assert str(caught.value) == message
    assert backend._base is None


def test_the_engine_is_told_what_the_backend_is_told() -> None:
    settings = engine_settings(
        "org/model",
        revision="abc",
        tokenizer="org/tokenizer",
        trust_remote_code=False,
        dtype=torch.bfloat16,
        memory=0.3,
        max_seq_len=4096,
    )
    assert settings == {
        "model": "org/model",
        "revision": "abc",
        "tokenizer": "org/tokenizer",
        "tokenizer_revision": None,
        "trust_remote_code": False,
        "dtype": "bfloat16",
        "gpu_memory_utilization": 0.3,
        "max_model_len": 4096,
        "enable_lora": True,
        "max_loras": 1,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
    }


def test_sampling_settings_keep_their_meaning() -> None:
    params = make_sampling(temperature=0.7, top_p=0.9, top_k=0, stop=("\n\n", 7, "END"))
    assert sampling_settings(params, max_tokens=5, end_ids={2, 1}, seed=11) == {
        "n": 1,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": -1,
        "seed": 11,
        "max_tokens": 5,
        "stop": ["\n\n", "END"],
        "stop_token_ids": [1, 2, 7],
        "logprobs": 0,
        "skip_special_tokens": False,
    }
    assert sampling_settings(make_sampling(top_k=40), max_tokens=1, end_ids=set(), seed=0)[
        "top_k"
    ] == (40)


def completion(*, finish_reason: str = "stop"):
    """An answer with the names of vLLM's `CompletionOutput` and `Logprob`."""
    return SimpleNamespace(
        token_ids=[5, 2],
        logprobs=[
            # Where the sampled token is not the likeliest, vLLM may name both.
            {9: SimpleNamespace(logprob=-0.1), 5: SimpleNamespace(logprob=-2.5)},
            {2: SimpleNamespace(logprob=-0.25)},
        ],
        finish_reason=finish_reason,
        stop_reason=None,
    )


def test_a_completion_holds_the_sampled_tokens_and_their_logprobs() -> None:
    found = completion_of(completion(), version=3)
    assert found.tokens.tolist() == [5, 2] and found.tokens.dtype == np.int32
    assert found.logprobs.tolist() == [-2.5, -0.25] and found.logprobs.dtype == np.float32
    assert found.stop_reason is StopReason.STOP and found.version == 3
    longer = completion_of(completion(finish_reason="length"), version=1)
    assert longer.stop_reason is StopReason.LENGTH
    with pytest.raises(BackendError, match="vLLM ended a completion with 'abort'"):
        completion_of(completion(finish_reason="abort"), version=1)


def test_each_completion_has_a_seed_of_its_own() -> None:
    """The same for the same numbers, whatever else is sampled; all of a call differ."""
    seeds = [
        row_seed(5, prompt=prompt, sample=sample) for prompt in range(9) for sample in range(9)
    ]
    assert len(set(seeds)) == 81 and all(0 <= seed < 2**63 for seed in seeds)
    assert row_seed(5, prompt=8, sample=8) == seeds[-1] != row_seed(6, prompt=8, sample=8)
    assert row_seed(2**100, prompt=0, sample=0) != row_seed(2**101, prompt=0, sample=0)


def test_the_limit_of_ranks_is_one_that_vllm_has() -> None:
    ranks = (1, 8, 9, 16, 64, 65, 129, 257, 321, 512)
    assert [rank_limit(rank) for rank in ranks] == [8, 8, 16, 16, 64, 128, 256, 320, 512, 512]


def test_one_published_adapter_is_kept_and_closing_leaves_nothing(open_backend, tmp_path) -> None:
    """The adapter is written with a session's own export; the engine is never started."""
    engine = VllmEngine({})
    publisher = AdapterPublisher(engine, session="a", rank=4, max_seq_len=None)
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    ref = session.save("one").result()
    first = publisher.publish(1, lambda folder: session.export(ref, folder))
    assert (first.folder / "adapter_model.safetensors").is_file()
    second = publisher.publish(2, lambda folder: session.export(ref, folder))
    assert not first.folder.exists() and second.folder.exists()
    other = AdapterPublisher(engine, session="b", rank=4, max_seq_len=None)
    third = other.publish(1, lambda folder: session.export(ref, folder))
    assert len({first.number, second.number, third.number}) == 3
    assert len({first.name, second.name, third.name}) == 3
    for each in (publisher, other):
        each.close()
        each.close()
    assert not second.folder.parent.exists() and not third.folder.parent.exists()


def test_a_session_publishes_to_vllm_and_older_generators_are_stale(open_backend, tmp_path) -> None:
    """What comes before vLLM is asked: export, version, limits, the refusal of a stale generator."""
    backend = open_backend()
    session = backend.open_session("a", make_lora(), directory=tmp_path)
    publisher = AdapterPublisher(VllmEngine({}), session="a", rank=4, max_seq_len=10)
    session._settings = replace(session._settings, publisher=publisher)
    first = session.publish_weights().result()
    folder = first._adapter.folder
    assert first.version == 1 and (folder / "adapter_config.json").is_file()
    second = session.publish_weights().result()
    assert second.version == 2 and not folder.exists()
    with pytest.raises(StaleGenerator, match="holds version 1"):
        first.sample([[5]], make_sampling(), 1).result()
    with pytest.raises(BackendError, match="leaves no room for an answer in the 10 tokens"):
        second.sample([[5] * 10], make_sampling(), 1).result()
    session.close()
    assert not second._adapter.folder.exists()


def test_scores_and_streams_are_of_the_published_weights(open_backend, tmp_path) -> None:
    """Training on changes neither; they are those of a generator of torch."""
    prompt, params = list(range(10, 40)), make_sampling(temperature=0.0)
    found = []
    for name in ("torch", "vllm"):
        session = open_backend().open_session(name, make_lora(), directory=tmp_path / name)
        if name == "vllm":
            publisher = AdapterPublisher(VllmEngine({}), session=name, rank=4, max_seq_len=None)
            session._settings = replace(session._settings, publisher=publisher)
        generator = session.publish_weights().result()
        for _ in range(2):
            [scores] = generator.score([prompt], 0).result()
            pieces = [piece.tokens for piece in generator.stream(prompt, params)]
            found.append((scores.logprobs, pieces))
            session.forward_backward(make_data(), cross_entropy)
            session.optim_step(make_adam(learning_rate=0.1)).result()
        session.close()
    assert all(one == found[0] for one in found)
