"""Tags in their order, for example a think block and then an answer block."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tunebook.errors import ConfigError


class TagFormat:
    """1 where the completion is exactly `<a>text</a><b>text</b>...` in the order of `tags`, else 0.

    White space around the blocks is free; other text there, a blank block, and a tag inside a block
    are not. It says nothing about what stands in the blocks: text without any sense scores 1, so
    give it a small weight beside a reward of the answer.
    """

    def __init__(self, *, tags: Sequence[str], first_is_open: bool) -> None:
        """
        Args:
            tags: names of the blocks, in their order.
            first_is_open: the prompt ends in the first opening tag, as some chat templates make it,
                so that the completion begins behind it.

        Raises:
            ConfigError: no tags, or one that is no name.
        """
        names = isinstance(tags, list | tuple) and all(isinstance(tag, str) for tag in tags)
        if not names or not tags or not all(re.fullmatch(r"[\w-]+", tag) for tag in tags):
            raise ConfigError(f"tags={tags}: must be a list of names such as [think, answer]")
        if len(set(tags)) < len(tags):
            raise ConfigError(f"tags={tags}: each name may stand there once")
        self.tags = tuple(tags)
        self.first_is_open = first_is_open

    def __call__(self, completion: str) -> float:
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        rest = completion.strip()
        for number, tag in enumerate(self.tags):
            if number > 0 or not self.first_is_open:
                if not rest.startswith(f"<{tag}>"):
                    return 0.0
                rest = rest.removeprefix(f"<{tag}>")
            block, closing, rest = rest.partition(f"</{tag}>")
            if not closing or not block.strip() or any(mark in block for mark in marks):
                return 0.0
            rest = rest.lstrip()
        return float(not rest)
