"""Keeps the router on its configuration: fetch, check, unite, apply; again and again.

What is applied changes only here, one sync at a time, and only after it was checked as a whole.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from msgspec import Struct

from router.core.broker import QueueNames
from router.core.config import NOTHING, RoutingConfig
from router.core.config_document import (
    BadDocument,
    Document,
    as_document,
    is_slow_to_read,
    read_document,
)
from router.core.config_plan import EMPTYING, Plan, empties, limit_connections, unite
from router.core.partitions import entries_of
from router.core.returning import Jitter
from router.core.state import SyncCounts
from router.core.warnings import Code, Severity
from router.engine.alerts import Alerts
from router.engine.periodic import every
from router.ports import ConfigSource, ConfigUnavailable

log = logging.getLogger(__name__)

SYNC_SOURCE: Final = "ConfigSync"  # of its warnings
LARGE_DOCUMENT_BYTES: Final = 64 * 1024
LARGE_DOCUMENT_ENTRIES: Final = 1000  # 100,000 take 0.4 s to unite, and messages do not wait

Apply = Callable[[RoutingConfig], Awaitable[Plan]]


class SyncFailed(Exception):
    """Nothing was applied; the text says why. What runs goes on as it was."""


class PartitionCounts(Protocol):
    """Remembers how many partitions each entry has, also through a restart (PART-4)."""

    @property
    def numbers(self) -> Mapping[str, int]: ...

    async def replace(self, numbers: Mapping[str, int], /) -> None:
        """Raises OSError."""


class SyncRules(Struct, frozen=True, kw_only=True):
    naming: QueueNames
    attempts: int = 12
    retry_delay: float = 5.0
    allow_empty: bool = False
    max_connections: int = 1000  # of all queues together


class SyncResult(Struct, frozen=True):
    ok: bool
    reason: str = ""  # why it failed


class SourceStatus(Struct, frozen=True):
    name: str
    last_success: float | None = None  # Unix seconds
    error: str = ""  # of the last attempt; "": it was good


class SyncStatus(Struct, frozen=True, kw_only=True):
    """For the API: without secrets."""

    last_success: float | None  # Unix seconds; None: nothing was applied yet
    document: Mapping[str, object]  # what is applied
    sources: tuple[SourceStatus, ...]


@dataclass(slots=True)
class _Source:
    """One source, and what is known of it."""

    origin: ConfigSource
    fresh: Document | None = None  # of the attempt under way
    good: Document | None = None  # the last one that was applied
    last_success: float | None = None
    error: str = ""

    async def fetch(self, naming: QueueNames, reading: asyncio.Lock) -> None:
        self.fresh = None
        try:
            body = await self.origin.fetch()
            # A large one takes a second to read, and messages do not wait for it. One after the
            # other: two threads would take two thirds of Python's lock.
            apart = len(body) > LARGE_DOCUMENT_BYTES or is_slow_to_read(body)
            read = partial(read_document, body, naming)
            async with reading:
                self.fresh = await asyncio.to_thread(read) if apart else read()
            self.error = ""
        except (ConfigUnavailable, BadDocument) as error:
            self.error = f"{self.origin.name}: {error}"

    @property
    def document(self) -> Document | None:
        """The document that counts: a source that fails keeps its last good one (CFG-4)."""
        return self.good if self.fresh is None else self.fresh

    def applied(self, now: float) -> None:
        if self.fresh is not None:
            self.good, self.last_success = self.fresh, now


class ConfigSync:
    def __init__(
        self,
        sources: Sequence[ConfigSource],
        apply: Apply,
        alerts: Alerts,
        rules: SyncRules,
        wall: Callable[[], float],
        *,
        partitions: PartitionCounts,
    ) -> None:
        self._sources = [_Source(source) for source in sources]
        self._apply = apply
        self._warn = alerts.of(SYNC_SOURCE)
        self._rules = rules
        self._wall = wall
        self._partitions = partitions
        self._one_at_a_time = asyncio.Lock()
        self._applied = NOTHING
        self._last_success: float | None = None
        self._succeeded = 0
        self._failed = 0

    async def run(self, interval: float, jitter: Jitter) -> None:
        """Sync again and again, until cancelled. The caller makes the first sync."""
        await every(interval, partial(self.sync, first=False), jitter=jitter)

    async def sync(self, *, first: bool) -> SyncResult:
        """Try until it works, or until the attempts are used up."""
        severity = Severity.CRITICAL if first else Severity.WARN
        try:
            await self._sync(self._rules.attempts, severity)
        except SyncFailed as failure:
            return SyncResult(ok=False, reason=str(failure))
        return SyncResult(ok=True)

    async def reload(self) -> Plan:
        """Try once, now. Raises SyncFailed."""
        return await self._sync(1, Severity.WARN)

    @property
    def counts(self) -> SyncCounts:
        return SyncCounts(self._succeeded, self._failed, self._last_success)

    def status(self) -> SyncStatus:
        return SyncStatus(
            last_success=self._last_success,
            document=as_document(self._applied),
            sources=tuple(
                SourceStatus(source.origin.name, source.last_success, source.error)
                for source in self._sources
            ),
        )

    async def _sync(self, attempts: int, severity: Severity) -> Plan:
        async with self._one_at_a_time:
            attempt = 1
            while True:
                try:
                    return await self._attempt()
                except SyncFailed as failure:
                    facts = {"attempt": attempt, "attempts": attempts}
                    log.warning("configuration sync attempt failed: %s", failure, extra=facts)
                    if attempt >= attempts:
                        self._failed += 1
                        text = f"the configuration was not synced: {failure}"
                        self._warn(Code.CONFIG_SYNC_FAILED, text, severity)
                        raise
                attempt += 1
                await asyncio.sleep(self._rules.retry_delay)

    async def _attempt(self) -> Plan:
        reading = asyncio.Lock()
        async with asyncio.TaskGroup() as fetches:
            for source in self._sources:
                fetch = source.fetch(self._rules.naming, reading)
                fetches.create_task(fetch, name=f"fetch {source.origin.name}")
        errors = [source.error for source in self._sources if source.fresh is None]
        if len(errors) == len(self._sources):
            raise SyncFailed("; ".join(errors))
        for error in errors:
            log.warning("a configuration source failed, its last good document is used: %s", error)
        documents = [(s.origin.name, s.document) for s in self._sources if s.document is not None]
        united = partial(self._unite, documents)
        found = [document.config for _, document in documents]
        entries = sum(len(c.queues) + len(c.pools) + len(c.reply_queues) for c in found)
        apart = entries > LARGE_DOCUMENT_ENTRIES
        config, problems = await asyncio.to_thread(united) if apart else united()
        if empties(self._applied, config) and not self._rules.allow_empty:
            raise SyncFailed(EMPTYING)
        # Called even if nothing changes: what operators changed by hand goes back (CFG-6).
        changes = await self._apply(config)
        now = self._wall()
        for source in self._sources:
            source.applied(now)
        self._applied, self._last_success = config, now
        self._succeeded += 1
        await self._note_partitions(documents, is_complete=not errors)
        for name, document in documents:
            for problem in document.problems:
                self._warn(problem.code, f"{name}: {problem}")
        for code, text in problems:
            self._warn(code, text)
        return changes

    async def _note_partitions(
        self, documents: Sequence[tuple[str, Document]], *, is_complete: bool
    ) -> None:
        """Remember the partitions of what runs; forget entries that no document has any more."""
        before = self._partitions.numbers
        divided = {queue.entry for queue in self._applied.queues if queue.entry is not None}
        if not before and not divided:
            return
        named = {name for _, each in documents for name in each.skipped.get("queues", ())}
        named.update(
            entry.name for _, each in documents for entry in entries_of(each.config.queues)
        )
        numbers = {name: n for name, n in before.items() if name in named or not is_complete}
        numbers |= {entry.name: entry.partitions for entry in divided if entry.partitions}
        if numbers == before:
            return
        try:
            await self._partitions.replace(numbers)
        except OSError as error:
            log.warning("the numbers of partitions cannot be kept: %s", error.strerror)

    def _unite(
        self, documents: Sequence[tuple[str, Document]]
    ) -> tuple[RoutingConfig, Sequence[tuple[Code, str]]]:
        """Return what is wanted, and what is wrong with it. In a thread, perhaps."""
        wanted, conflicts = unite(documents, self._applied, self._partitions.numbers)
        config, shortage = limit_connections(wanted, self._rules.max_connections, self._applied)
        problems = [(Code.CONFIG_CONFLICT, conflict) for conflict in conflicts]
        return config, [*problems, *([(Code.CONFIGURATION, shortage)] if shortage else ())]
