"""Settings of the local backend, several sessions, the queue, estimates, memory."""

import gc
import math
from functools import partial
from pathlib import Path

import pytest
import torch

from loss_fns.cross_entropy import cross_entropy
from tests.backends.test_local_training import parameters_of
from tests.backends.tiny import make_adam, make_data, make_lora, make_sampling
from tunebook.backends.local import LocalBackend
from tunebook.backends.local.distributed import ShardedBackend
from tunebook.backends.local.execution import padded_tokens
from tunebook.backends.local.probe import Measurement, extrapolate
from tunebook.errors import BackendError, ConfigError
from tunebook.types import Workload


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "gpu"}, "backend.device=gpu: must be one of auto, cpu, cuda, mps"),
        ({"device": "cpu:1"}, "backend.device=cpu:1"),
        ({"dtype": "float16"}, "backend.dtype=float16: must be one of auto, float32, bfloat16"),
        ({"micro_batch_tokens": 0}, "backend.micro_batch_tokens=0"),
    ],
)
def test_bad_settings_name_key_value_and_allowed(tiny, settings: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LocalBackend(model=tiny.untied, **settings)


@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_a_device_that_is_not_there(tiny, device: str) -> None:
    there = torch.cuda.is_available() if device == "cuda" else torch.backends.mps.is_available()
    if there:
        pytest.skip(f"this machine has {device}")
    with pytest.raises(ConfigError, match=f"backend.device={device}: no"):
        LocalBackend(model=tiny.untied, device=device)


@pytest.mark.parametrize("setting", [{"base_weights": "nf4"}, {"generator": "vllm"}])
def test_several_processes_have_neither_4_bits_nor_vllm(tiny, setting: dict) -> None:
    ((key, value),) = setting.items()
    with pytest.raises(ConfigError, match=f"backend.{key}={value}: several processes have"):
        ShardedBackend(model=tiny.untied, device="cpu", **setting)


def test_capabilities_need_no_weights(tiny, tmp_path) -> None:
    config_only = tmp_path / "config_only"
    config_only.mkdir()
    (config_only / "config.json").write_text((Path(tiny.untied) / "config.json").read_text())
    capabilities = LocalBackend(model=str(config_only), device="cpu").capabilities
    assert capabilities.max_seq_len == 256 and capabilities.losses is None
    assert capabilities.max_sessions > 100
    assert capabilities.full_weight and capabilities.has_generator
    assert capabilities.optimizers == {"adamw", "muon"}
    with pytest.raises(ConfigError, match="cannot be loaded"):
        LocalBackend(model=str(config_only), device="cpu").open_session(
            "a", make_lora(), directory=tmp_path
        )


def test_weights_that_are_pickled_are_refused(tiny, tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.untied)
    model.config.save_pretrained(tmp_path / "pickled")
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match="allow_pickle"):
        LocalBackend(model=str(tmp_path / "pickled"), device="cpu").open_session(
            "a", make_lora(), directory=tmp_path
        )
    allowed = LocalBackend(model=str(tmp_path / "pickled"), device="cpu", allow_pickle=True)
    assert allowed.open_session("a", make_lora(), directory=tmp_path).trainable_parameters > 0


def test_names_are_unique_and_closing_frees_them(tiny, tmp_path) -> None:
    with LocalBackend(model=tiny.untied, device="cpu") as backend:
        session = backend.open_session("a", make_lora(), directory=tmp_path)
        with pytest.raises(BackendError, match="'a' is open already"):
            backend.open_session("a", make_lora(), directory=tmp_path)
        session.close()
        backend.open_session("a", make_lora(), directory=tmp_path)
    backend.close()
    with pytest.raises(BackendError, match="this backend is closed"):
        backend.open_session("b", make_lora(), directory=tmp_path)


def test_many_sessions_over_one_base(open_backend, tmp_path) -> None:
    """Mixed ranks, targets and dropout, driven in turn: each as if alone."""
    configs = [
        make_lora(),
        make_lora(rank=2, target_modules=("q_proj", "v_proj"), seed=1),
        make_lora(rank=8, alpha=4.0, dropout=0.2, target_modules=("lm_head", "up_proj"), seed=2),
    ]
    rows = [make_data(seed=seed) for seed in range(3)]

    def step(session, data) -> None:
        session.forward_backward(data, cross_entropy)
        session.optim_step(make_adam())

    expected = []
    for config, data in zip(configs, rows, strict=True):
        alone = open_backend().open_session("alone", config, directory=tmp_path)
        for _ in range(3):
            step(alone, data)
        alone.forward(data).result()
        expected.append(parameters_of(alone))
    backend = open_backend()
    sessions = [
        backend.open_session(str(number), config, directory=tmp_path)
        for number, config in enumerate(configs)
    ]
    for _ in range(3):
        for session, data in zip(sessions, rows, strict=True):
            step(session, data)
    for session, data, values in zip(sessions, rows, expected, strict=True):
        session.forward(data).result()
        for name, value in parameters_of(session).items():
            assert torch.allclose(value, values[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("fast", [True, False])
def test_operations_wait_for_somebody_to_wait(open_backend, tmp_path, fast: bool) -> None:
    """Queued by the call, run by `result()`: in call order, or together with others of their kind.

    What stands behind another kind of operation of its session never runs before that.
    """
    order: list[str] = []

    def noting(name: str):
        def loss(logprobs, *, token_weights):
            order.append(name)
            return cross_entropy(logprobs, token_weights=token_weights)

        return loss

    backend = open_backend(fast=fast)
    first = backend.open_session("first", make_lora(), directory=tmp_path)
    second = backend.open_session("second", make_lora(), directory=tmp_path)
    a = first.forward_backward(make_data(), noting("a"))
    b = second.forward_backward(make_data(), noting("b"))
    c = first.forward_backward(make_data(), noting("c"))
    step = first.optim_step(make_adam())
    d = first.forward_backward(make_data(), noting("d"))
    assert order == []
    b.result()
    assert order == (["a", "b", "c"] if fast else ["a", "b"])
    assert a.done and not step.done and not d.done
    assert a.result() == a.result()
    c.result()
    assert order == ["a", "b", "c"]
    d.result()
    assert step.done and order == ["a", "b", "c", "d"]


def test_rows_are_taken_when_called(open_backend, tmp_path) -> None:
    """A list that the caller reuses before anybody waits does not change what was asked."""
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    rows = make_data()
    scored, trained = session.forward(rows), session.forward_backward(rows, cross_entropy)
    prompts = [[5, 6]]
    sampled = session.publish_weights().result().sample(prompts, make_sampling(), 1)
    rows.clear()
    prompts.clear()
    assert len(scored.result()) == 4 and trained.result()["num_tokens"] == 16
    assert len(sampled.result()) == 1


def test_a_failure_stays_with_its_session(open_backend, tmp_path) -> None:
    def failing(logprobs, *, token_weights):
        raise ZeroDivisionError("bad loss")

    backend = open_backend()
    bad = backend.open_session("bad", make_lora(), directory=tmp_path)
    good = backend.open_session("good", make_lora(), directory=tmp_path)
    failed = bad.forward_backward(make_data(), failing)
    assert math.isfinite(good.forward_backward(make_data(), cross_entropy).result()["loss"])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="bad loss"):
            failed.result()
    with pytest.raises(BackendError, match=r"refuses save: its forward_backward failed .*bad loss"):
        bad.save("x").result()
    good.optim_step(make_adam()).result()


def test_an_interrupt_reaches_whoever_waits(open_backend, tmp_path) -> None:
    def interrupted(logprobs, *, token_weights):
        raise KeyboardInterrupt

    backend = open_backend()
    first = backend.open_session("first", make_lora(), directory=tmp_path)
    second = backend.open_session("second", make_lora(), directory=tmp_path)
    first.forward_backward(make_data(), interrupted)
    waiting = second.forward(make_data())
    with pytest.raises(KeyboardInterrupt):
        waiting.result()
    # The interrupted session is half-way through a step; the other goes on.
    assert len(waiting.result()) == 4
    with pytest.raises(BackendError, match="refuses forward"):
        first.forward(make_data()).result()


def test_closing_drops_what_nobody_waited_for(open_backend, tmp_path) -> None:
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    future = session.save("never")
    session.close()
    with pytest.raises(BackendError, match="closed before its save was waited for"):
        future.result()
    assert not (tmp_path / "never").exists()
    with pytest.raises(BackendError, match="is closed, it takes no forward"):
        session.forward(make_data())


@pytest.mark.parametrize("lora", [make_lora(dropout=0.1), None], ids=["adapter", "full"])
def test_an_estimate_measures_and_leaves_nothing(open_backend, tmp_path, lora) -> None:
    data = make_data()
    backend = open_backend()
    estimate = backend.estimate(
        Workload(
            lengths=[20] * 10,
            eval_lengths=[15] * 4,
            supervised=[5] * 10,
            batch_size=4,
            planned_steps=6,
            num_evaluations=2,
            lora=lora,
            sample=data,
        )
    )
    assert estimate.seconds is not None and 0 < estimate.seconds < 60
    assert estimate.train_tokens == 400  # 10 rows of 20 tokens, 6 steps of 3 an epoch.
    assert estimate.price is None
    if Path("/proc/self/status").exists():
        assert estimate.peak_memory_bytes is not None and estimate.peak_memory_bytes > 10**7
    assert "measured on cpu in float32" in estimate.basis
    session = backend.open_session("a", make_lora(), directory=tmp_path)
    fresh = open_backend().open_session("a", make_lora(), directory=tmp_path)
    for ours, theirs in zip(
        session.forward(data).result(), fresh.forward(data).result(), strict=True
    ):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())
    assert all(parameter.grad is None for parameter in session._base.model.parameters())


def test_extrapolation_is_proportional_to_computed_tokens() -> None:
    """Sample: 2 rows of 11 tokens are 2 x 10 computed, 2 s a step, 0.5 s forward.

    Plan: rows of 21 and 11, batch 2, 5 steps. With padding 2 x 20 = 40 a step, 200 in all, without
    20 + 10 = 30 a step, 150 in all. Evaluation: 3 times one row of 11: 30.
    (200 x 2 + 30 x 0.5) / 20 = 20.75 s, and (150 x 2 + 30 x 0.5) / 20 = 15.75 s.
    """
    workload = Workload(
        lengths=[21, 11],
        eval_lengths=[11],
        supervised=[5, 5],
        batch_size=2,
        planned_steps=5,
        num_evaluations=3,
        lora=make_lora(),
        sample=make_data((7, 7)),
    )
    measured = Measurement(step_s=2.0, forward_s=0.5, peak_memory_bytes=123)
    padded = partial(padded_tokens, rows_per_unit=1, max_tokens=1000)
    estimate = extrapolate(workload, measured, computed_tokens=padded, device="cpu")
    assert estimate.seconds == pytest.approx(20.75)
    estimate = extrapolate(workload, measured, computed_tokens=sum, device="cpu")
    assert estimate.seconds == pytest.approx(15.75)
    assert estimate.train_tokens == 160 and estimate.peak_memory_bytes == 123


def test_nothing_to_measure_is_said(open_backend) -> None:
    workload = Workload([5], [], [1], 1, 1, 0, make_lora(), [])
    estimate = open_backend().estimate(workload)
    assert estimate.seconds is None and "no rows to measure" in estimate.basis


def test_memory_is_flat_and_metrics_are_floats(open_backend, tmp_path) -> None:
    """Case 126: under 5 MB between step 100 and step 300; no graph hangs on what is returned."""
    if not Path("/proc/self/statm").exists():
        pytest.skip("needs /proc")

    def resident() -> int:
        gc.collect()
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    data = make_data((2, 3))
    session = open_backend().open_session("a", make_lora(), directory=tmp_path)
    kept, at_100 = [], 0
    for step in range(300):
        loss = session.forward_backward(data, cross_entropy)
        kept.append({**session.optim_step(make_adam()).result(), **loss.result()})
        if step == 99:
            at_100 = resident()
    assert resident() - at_100 < 5e6
    assert all(type(value) is float for metrics in kept for value in metrics.values())


def test_generators_do_not_keep_old_weights(open_backend, tmp_path) -> None:
    """A stale generator that nobody holds is freed, its copy of the weights with it."""
    import weakref

    session = open_backend().open_session("a", None, directory=tmp_path)
    generator = session.publish_weights().result()
    generator.sample([[5]], make_sampling(max_tokens=2), 1).result()
    gone = weakref.ref(generator)
    del generator
    gc.collect()
    assert gone() is None
    session.forward_backward(make_data(), cross_entropy)
    session.optim_step(make_adam()).result()
