"""A judge behind an OpenAI-compatible endpoint, on a real server of this machine."""

import asyncio
import http.server
import json
import logging
import threading

import pytest

pytest.importorskip("httpx2")

from tests.rewards.scorers import scorer_of
from tunebook.errors import ConfigError
from tunebook.rewards import LLMJudge
from tunebook.scoring import Sample, score_metrics

KEY = "j5-Zq81-not-a-real-key"
INSTRUCTIONS = (
    "Question: {question}\nResponse: {completion}\nRight answer: {answer}\nScore: <number>"
)


class Judge(http.server.BaseHTTPRequestHandler):
    """Answers as the response in the request says."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append({"path": self.path, "body": body, **self.headers})
        content = body["messages"][0]["content"]
        said = content.split("Response: ")[1].split("\nRight answer")[0]
        status, _, text = said.partition(" ")
        if status == "hang":
            self.server.over.wait(60)
            status = "200"
        if status == "cut":
            self.connection.close()
            return
        if status == "raw":
            self._send(200, text)
        elif int(status) >= 400:
            self._send(int(status), f"no, {self.headers['Authorization']}: {text}")
        else:
            self._send(200, json.dumps({"choices": [{"message": {"content": text}}]}))

    def _send(self, status, text):
        data = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format, *arguments):
        """The test's output is not its log."""


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("JUDGE_API_KEY", KEY)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        server.daemon_threads = True
        server.asked = []
        server.over = threading.Event()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
        thread.join()


def node_of(server, **changes):
    return {
        "_target_": "tunebook.rewards.LLMJudge",
        "base_url": f"http://127.0.0.1:{server.server_port}/v1/",
        "model": "a-judge",
        "api_key_variable": "JUDGE_API_KEY",
        "instructions": INSTRUCTIONS,
        "low": 0,
        "high": 10,
        "request": {"max_tokens": 99},
        **changes,
    }


def score_of(server, *completions, fail=False, timeout_s=20.0, **changes):
    prompt = [{"role": "user", "content": "How much is 1 + 1?"}]
    with scorer_of({"judge": node_of(server, **changes)}, timeout_s=timeout_s, fail=fail) as scorer:
        return scorer.score([Sample(text, {"prompt": prompt, "answer": 2}) for text in completions])


def test_what_is_asked(server):
    [score] = score_of(server, "200 Score: 10")
    [asked] = server.asked
    assert score.total == 1.0
    assert asked["path"] == "/v1/chat/completions"
    assert asked["Authorization"] == f"Bearer {KEY}"
    assert asked["body"] == {
        "model": "a-judge",
        "max_tokens": 99,
        "messages": [{
            "role": "user",
            "content": "Question: How much is 1 + 1?\nResponse: 200 Score: 10\n"
            "Right answer: 2\nScore: <number>",
        }],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("Score: 10", 1.0),
        ("Score: 0", 0.0),
        ("Good. Score: 7.5", 0.75),
        ("Score: 3 at first, but\nscore: 4", 0.4),
        ("**Score:** 5", 0.5),
        ("Score = 5/10", 0.5),
    ],
)
def test_scores_are_mapped_to_rewards(server, said, reward):
    assert score_of(server, f"200 {said}")[0].total == reward


def test_ranges_are_mapped_too(server):
    scores = score_of(server, "200 Score: -1", "200 Score: 1", low=-1, high=3)
    assert [score.total for score in scores] == [0.0, 0.5]


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        ("429 slow down", "rate_limited"),
        ("500 broken", "http_error"),
        ("503 later", "http_error"),
        ("cut", "unreachable"),
        ("200 I like it.", "unparsable"),
        ("200 Score: 11", "unparsable"),
        ("200 Score: -1", "unparsable"),
        ("200 Score: many", "unparsable"),
        ("raw no JSON", "unparsable"),
        ("raw {}", "unparsable"),
        ('raw {"choices": []}', "unparsable"),
        ('raw {"choices": [{"message": {"content": null}}]}', "unparsable"),
    ],
)
def test_case_66_what_the_completion_cannot_help_is_unscored(server, completion, kind):
    """Also where errors end a run; and the others of the batch are scored."""
    for fail in (False, True):
        scores = score_of(server, "200 Score: 5", completion, fail=fail)
        assert [score.total for score in scores] == [0.5, None]
        assert [problem.kind for problem in scores[1].problems] == [kind]
        assert score_metrics(scores)[f"unscored/{kind}"] == 1
        assert KEY not in str(scores)


def test_what_the_server_refuses_for_good_raises(server):
    [score] = score_of(server, "401 wrong key")
    [problem] = score.problems
    assert problem.kind == "exception" and "HTTP 401" in problem.message
    assert KEY not in problem.message and KEY not in str(problem.traceback)


def test_a_server_that_hangs_costs_its_time(server):
    scores = score_of(server, "200 Score: 5", "hang Score: 5", timeout_s=2.0)
    assert [score.total for score in scores] == [0.5, None]
    assert scores[1].problems[0].kind == "timeout"


def test_nobody_listens(server):
    [score] = score_of(server, "200 Score: 5", base_url="http://127.0.0.1:9/v1")
    assert score.problems[0].kind == "unreachable"


def test_the_key_is_never_logged(server, caplog, capfd):
    caplog.set_level(logging.DEBUG)
    reward = LLMJudge(**{k: v for k, v in node_of(server).items() if k != "_target_"})
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]

    async def ask():
        return await reward("200 Score: 5", prompt=prompt, answer=2)

    assert [asyncio.run(ask()), asyncio.run(ask())] == [0.5, 0.5]  # in two event loops
    assert "system: Be brief.\n\nuser: Hi" in server.asked[0]["body"]["messages"][0]["content"]
    assert KEY not in caplog.text + repr(reward) + "".join(capfd.readouterr())


def test_placeholders_in_a_completion_stay_text(server):
    score_of(server, "200 {answer} {question} Score: 5")
    content = server.asked[0]["body"]["messages"][0]["content"]
    assert "Response: 200 {answer} {question} Score: 5\n" in content


def test_an_endpoint_may_need_no_key(server):
    score_of(server, "200 Score: 5", api_key_variable=None)
    assert "Authorization" not in server.asked[0]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"base_url": None}, ["base_url=null"]),
        ({"base_url": "localhost:8000"}, ["base_url=localhost:8000", "http"]),
        ({"model": None}, ["model is not given"]),
        ({"instructions": "Judge."}, ["{completion}"]),
        ({"low": 1, "high": 1}, ["low=1, high=1"]),
        ({"api_key_variable": "JUDGE_NO_KEY"}, ["JUDGE_NO_KEY is not set"]),
        ({"api_key_variable": ""}, ["name of an environment variable"]),
    ],
)
def test_bad_settings_are_refused(server, changes, words):
    with pytest.raises(ConfigError) as raised:
        scorer_of({"judge": node_of(server, **changes)})
    for word in ("reward.functions.judge", *words):
        assert word in str(raised.value)


def test_a_key_in_place_of_its_variable_is_refused_and_not_shown(server):
    with pytest.raises(ConfigError, match="never the key itself") as raised:
        scorer_of({"judge": node_of(server, api_key_variable=KEY)})
    assert KEY not in str(raised.value)


def test_instructions_that_need_an_answer_need_the_column(server):
    with scorer_of({"judge": node_of(server)}, columns=("prompt",)) as scorer:
        [score] = scorer.score([Sample("200 Score: 5", {"prompt": []})])
    assert score.problems[0].kind == "exception" and "{answer}" in score.problems[0].message
