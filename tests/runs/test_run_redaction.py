"""No secret reaches a file, a log or a tracker."""

import pytest

from tunebook.runs.redaction import (
    REDACTED,
    contains_secret,
    redact,
    redact_config,
    redact_values,
    secrets_in,
)

SHA1 = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "value", "secret"),
    [
        ("WANDB_API_KEY", "sentinel-value", True),
        ("HF_TOKEN", "sentinel-value", True),
        ("MY_SERVICE_SECRET", "sentinel-value", True),
        ("DB_PASSWORD", "sentinel-value", True),
        ("AWS_SECRET_ACCESS_KEY", "sentinel-value", True),
        ("OPENAI_APIKEY", "sentinel-value", True),
        ("aws_session_token", "sentinel-value", True),
        ("TOKENIZERS_PARALLELISM", "sentinel-value", False),
        ("KEYBOARD", "sentinel-value", False),
        ("PWD", "/home/somebody", False),
        ("HF_TOKEN_PATH", "/home/somebody/token", False),
        ("SSH_AUTH_SOCK", "/run/agent.sock", False),
        ("API_KEY", "short", False),
    ],
)
def test_which_variables_are_secret(name: str, value: str, secret: bool) -> None:
    assert secrets_in({name: value}) == ([value] if secret else [])


def test_the_longer_of_two_nested_secrets_goes_first() -> None:
    environ = {"A_KEY": "abcdefgh", "B_KEY": "abcdefgh-ijkl"}
    assert redact("x abcdefgh-ijkl y abcdefgh", environ) == f"x {REDACTED} y {REDACTED}"


@pytest.mark.parametrize(
    "text",
    [
        "hf_" + "a1B2" * 8,
        "sk-proj-" + "a1B2" * 8,
        "tgp_v1_" + "a1B2" * 8,
        "tml-" + "a1B2" * 8,
        "ghp_" + "a1B2" * 9,
        "AKIA" + "ABCD" * 4,
        "wandb_v1_" + "a1B2" * 8,
        "sk-" + "a1B2" * 12,
        "sk-" + "0a1b2c3d" * 4,
        "sk-or-v1-" + "0a1b2c3d" * 8,
        "sk-ant-api03-" + "a1B-2_" * 15,
        "github_pat_" + "a1B2_" * 16,
    ],
)
def test_well_known_keys_are_recognised_by_shape(text: str) -> None:
    assert redact(f"before {text}, after", {}) == f"before {REDACTED}, after"


@pytest.mark.parametrize(
    "text", [f"WANDB_API_KEY={SHA1}", f"wandb login {SHA1}", f'{{"key": "{SHA1}"}}']
)
def test_a_wandb_key_is_recognised_by_its_neighbours(text: str) -> None:
    assert SHA1 not in redact(text, {})


@pytest.mark.parametrize(
    "text",
    [
        SHA1,
        f"revision: {SHA1}",
        "task-oriented-dialogue-with-many-words",
        "risk-management-for-beginners-2024",
        "half_precision_of_all_tokens",
        "b" * 64,
        "models/sk-cs-translator-base-v1",
        "models/sk-cs-Translator-Base-2024-with-a-long-name",
        "sk-ant-colony-optimisation-of-2024-models",
        "sk-SLOVAKTRANSLATORBASE2024",
        "tml-a-very-long-model-name-2024",
        "hf_models_of_2024/hf_internal_testing_tiny_random",
        f"models--acme--wandb-token-monkey/snapshots/{SHA1}",
        "the bearer certificates-of-deposit",
    ],
)
def test_commits_hashes_and_words_stay(text: str) -> None:
    assert redact(text, {}) == text


def test_a_config_keeps_what_a_resume_needs() -> None:
    environ = {"MY_TOKEN": "sentinel-value"}
    config = {
        "model": {"name": "models/sk-cs-translator-base-v1", "revision": SHA1},
        "data": {"path": "a/sentinel-value/b", "system_prompt": "Bearer abc.def-123456 or so"},
        "note": "hf_" + "a1B2" * 8,
    }
    assert redact_config(config, environ) == {
        "model": {"name": "models/sk-cs-translator-base-v1", "revision": SHA1},
        "data": {"path": f"a/{REDACTED}/b", "system_prompt": "Bearer abc.def-123456 or so"},
        "note": REDACTED,
    }


def test_whether_a_text_could_not_stand_in_a_config() -> None:
    environ = {"MY_TOKEN": "sentinel-value"}
    assert contains_secret("You know sentinel-value.", environ)
    assert contains_secret("Use hf_" + "a1B2" * 8, environ)
    assert not contains_secret("You are the bearer of certificates-2024.", environ)
    assert not contains_secret("", environ)


def test_credentials_in_addresses_and_headers() -> None:
    assert redact("https://me:geheim@host/x", {}) == f"https://me:{REDACTED}@host/x"
    assert redact("Authorization: Bearer abc.def-123456", {}) == (
        f"Authorization: Bearer {REDACTED}"
    )


def test_nested_values_and_keys() -> None:
    environ = {"X_TOKEN": "sentinel-value"}
    value = {"a sentinel-value": ["sentinel-value", 3, None, {"b": "ok sentinel-value"}]}
    assert redact_values(value, environ) == {
        f"a {REDACTED}": [REDACTED, 3, None, {"b": f"ok {REDACTED}"}]
    }


def test_config_keys_that_hold_secrets() -> None:
    config = {
        "api_key": "abc",
        "hub": {"token": "abc", "eos_token": "</s>", "api_key": "${oc.env:HF_TOKEN}"},
        "max_tokens": 64,
        "password": None,
        "list": [{"secret": "abc"}],
    }
    assert redact_config(config, {}) == {
        "api_key": REDACTED,
        "hub": {"token": REDACTED, "eos_token": "</s>", "api_key": "${oc.env:HF_TOKEN}"},
        "max_tokens": 64,
        "password": None,
        "list": [{"secret": REDACTED}],
    }


def test_what_signs_an_address() -> None:
    """Whoever has such an address can read the file; other addresses stay as they are."""
    signed = (
        "https://bucket.s3.amazonaws.com/a/weights?X-Amz-Algorithm=AWS4-HMAC-SHA256"
        "&X-Amz-Credential=ASIA%2F20260101&X-Amz-Expires=3600&X-Amz-Signature=0a1b2c"
    )
    assert redact(f"HTTP 403 for GET {signed}: no", {}) == (
        "HTTP 403 for GET https://bucket.s3.amazonaws.com/a/weights?X-Amz-Algorithm="
        f"AWS4-HMAC-SHA256&X-Amz-Credential={REDACTED}&X-Amz-Expires=3600"
        f"&X-Amz-Signature={REDACTED} no"
    )
    assert (
        redact("https://x.blob/f?se=2026&sig=a%2Bb", {})
        == f"https://x.blob/f?se=2026&sig={REDACTED}"
    )
    plain = "https://host/data.jsonl?download=true&design=3"
    assert redact(plain, {}) == plain
