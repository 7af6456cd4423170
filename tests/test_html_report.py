"""The page about a run."""

from html.parser import HTMLParser
from pathlib import Path

from tunebook.html_report import write_html_report
from tunebook.runs import Evaluation, RunDir, StopReason

VOID = {"meta", "img"}


class Balance(HTMLParser):
    """Checks that tags close in order, and collects text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(path: Path) -> Balance:
    page = Balance()
    page.feed(path.read_text(encoding="utf-8"))
    page.close()
    assert page.open == []
    return page


def test_a_page_holds_everything_and_escapes_it(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    run.write_plan({"model": "<script>m</script>", "hash": "abc"})
    with run.attempt(planned_steps=2):
        run.write_samples(0, [{"prompt": "<b>p</b>", "completion": "a & b", "expected": "c<d"}])
        for step in (1, 2):
            run.log_metrics(step, {"train/loss": 1.0 / step})
        run.write_samples(2, [{"prompt": "<b>p</b>", "completion": "</td><script>x"}])
        run.finish(StopReason.COMPLETED, steps=2)
    page = parsed(write_html_report(run))
    text = "".join(page.text)
    for part in (
        "<b>p</b>",
        "a & b",
        "expected",
        "c<d",
        "</td><script>x",
        "<script>m</script>",
        "step 2",
        "succeeded",
    ):
        assert part in text, part
    assert "script" not in page.seen and "b" not in page.seen
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert (run.path / "curves.png").is_file()


def test_a_page_leaves_wrapping_to_the_browser(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, "sft", None)
    long = "many words " * 40 + "end"
    run.write_plan({"warnings": [long]})
    with run.attempt(planned_steps=1):
        run.log_metrics(1, {"train/loss": 1.0})
        run.write_samples(0, [{"prompt": "p", "completion": "c"}])
        run.set_evaluation(Evaluation("eval/loss", "down", 0.5, 1, 0.5, 1, 1, 123456, False))
        run.finish(StopReason.COMPLETED, steps=1)
    text = "".join(parsed(write_html_report(run)).text)
    assert long in text and "; the model is from step 123456" in text
    assert "expected" not in text


def test_a_page_about_a_fresh_run(tmp_path: Path) -> None:
    text = "".join(parsed(write_html_report(RunDir.create(tmp_path, "sft", None))).text)
    assert "has not started" in text and "Answers" not in text
