"""Which entry of `targets` a URL belongs to: the longest prefix by path segments (TGT-1)."""

import re
from collections.abc import Iterable
from typing import Final
from urllib.parse import urlsplit

from router.core.config import TargetConfig
from router.core.target import origin_of

# `.` and `..` between slashes, also percent-encoded: a target may resolve them to another path.
_DOTS: Final = re.compile(r"(?:^|/)(?:\.|%2e){1,2}(?:/|$)", re.IGNORECASE)


class TargetTable:
    """The entries of a configuration. To find one takes as long with 1,000 as with one."""

    def __init__(self, entries: Iterable[TargetConfig] = ()) -> None:
        self.entries = tuple(entries)
        self.at = {entry.match: entry for entry in self.entries}.get  # by its place
        self._by_origin: dict[str, dict[str, TargetConfig]] = {}  # then by path
        for entry in self.entries:
            origin = origin_of(entry.match)
            self._by_origin.setdefault(origin, {})[entry.match[len(origin) :]] = entry

    def __len__(self) -> int:
        return len(self.entries)

    def find(self, url: str) -> TargetConfig | None:
        """Return the entry of a URL that was read before, if there is one."""
        by_path = self._by_origin.get(origin_of(url))
        if by_path is None:
            return None
        path = urlsplit(url).path
        if has_dots(path):
            return by_path.get("")
        deepest = max(map(_depth, by_path))
        parts = path.split("/", deepest + 1)[: deepest + 1]
        for length in range(len(parts), 0, -1):
            entry = by_path.get("/".join(parts[:length]))
            if entry is not None:
                return entry
        return None


def has_dots(path: str) -> bool:
    """Return whether a path has segments that lead to another path."""
    return _DOTS.search(path) is not None


def _depth(path: str) -> int:
    return path.count("/")
