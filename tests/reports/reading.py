"""Reads a page as a strict parser does."""

from html.parser import HTMLParser

VOID = {"meta", "link"}


class Page(HTMLParser):
    """Checks that tags close in order, and collects what a page holds."""

    def __init__(self, path):
        super().__init__()
        self.open = []
        self.tags = []
        self.texts = []
        self.targets = []
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    @property
    def text(self):
        return "".join(self.texts)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.targets += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
