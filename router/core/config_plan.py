"""Unites documents to a configuration, and plans the way from one configuration to the next."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from router.core.broker import QueueNames
from router.core.config import (
    DEFAULT_POOL_CONFIG,
    NOTHING,
    PoolConfig,
    QueueConfig,
    RetryPolicy,
    Route,
    RoutingConfig,
    Schedule,
    TargetConfig,
    with_ordering,
    with_reply_names,
)
from router.core.config_document import MAX_PROBLEMS, BadDocument, Document, read_document
from router.core.config_entry import Problem, schedule_entry
from router.core.message import DEFAULT_POOL
from router.core.partitions import all_queues, entries_of
from router.core.redact import mask_urls
from router.core.warnings import Code

EMPTYING: Final = "it would remove every queue of a running router"

T = TypeVar("T", QueueConfig, PoolConfig, Schedule, TargetConfig)
E = TypeVar("E", QueueConfig, Schedule, TargetConfig)  # those that have a name


class Plan(Struct, frozen=True, kw_only=True):
    """The changes that a new configuration makes (CFG-6, CFG-7). Pairs are old and new."""

    start: tuple[QueueConfig, ...] = ()
    stop: tuple[QueueConfig, ...] = ()
    replace: tuple[tuple[QueueConfig, QueueConfig], ...] = ()
    keep: tuple[QueueConfig, ...] = ()
    create: tuple[PoolConfig, ...] = ()
    drain: tuple[PoolConfig, ...] = ()
    change: tuple[tuple[PoolConfig, PoolConfig], ...] = ()
    # Lines about the rest: nothing is started or stopped.
    replies: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()
    targets: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return one line per change, for people."""
        return [
            *(f"queue {queue.name}: start ({_started(queue)})" for queue in self.start),
            *(
                f"queue {new.name}: replace ({_differences(old, new, _hidden_in(old, new))})"
                for old, new in self.replace
            ),
            *(f"queue {queue.name}: stop" for queue in self.stop),
            *(f"pool {pool.code}: create ({_described(pool)})" for pool in self.create),
            *(f"pool {new.code}: change ({_differences(old, new)})" for old, new in self.change),
            *(f"pool {pool.code}: drain" for pool in self.drain),
            *self.replies,
            *self.schedules,
            *self.targets,
        ]

    def as_json(self) -> Mapping[str, Mapping[str, Sequence[str]]]:
        """Return names by what becomes of them, for programs."""
        return {
            "queues": {
                "started": [queue.name for queue in self.start],
                "replaced": [new.name for _, new in self.replace],
                "stopped": [queue.name for queue in self.stop],
                "kept": [queue.name for queue in self.keep],
            },
            "pools": {
                "created": [pool.code for pool in self.create],
                "changed": [new.code for _, new in self.change],
                "drained": [pool.code for pool in self.drain],
            },
        }


class CheckReport(Struct, frozen=True):
    """The report of `config check`."""

    problems: tuple[Problem, ...]
    lines: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether all of the document would be applied."""
        return not any(problem.skipped for problem in self.problems)


def unite(
    documents: Sequence[tuple[str, Document]],
    running: RoutingConfig = NOTHING,
    partitions: Mapping[str, int] = {},
) -> tuple[RoutingConfig, list[str]]:
    """Return one configuration of several documents; the first wins a conflict (CFG-4).

    An entry that was skipped in its document leaves what runs under its name as it was (CFG-5).
    `partitions`: how many each entry had before this start.
    """
    before = _by_name(entries_of(running.queues))
    queues = _Union("queue", before)
    pools = _Union("pool", _by_name(running.pools))
    replies = _Union("reply queue", _by_name(running.reply_queues))
    schedules = _Union("schedule", _by_name(running.schedules))
    targets = _Union("target", _by_name(running.targets))
    for source, document in documents:
        found, skipped = document.config, document.skipped
        queues.add(source, entries_of(found.queues), skipped.get("queues", ()))
        pools.add(source, found.pools, skipped.get("processingPools", ()))
        replies.add(source, found.reply_queues, skipped.get("replyQueues", ()))
        schedules.add(source, found.schedules, skipped.get("schedules", ()))
        targets.add(source, found.targets, skipped.get("targets", ()))
    entries, kept = _as_divided(queues.entries(), before, partitions)
    complete = with_ordering(with_reply_names(entries, replies.entries()), pools.entries())
    apart, same = _one_consumer_each(all_queues(complete))
    matched, twice = _one_entry_each(targets.entries())
    config = RoutingConfig(
        tuple(apart),
        tuple(pools.entries()),
        tuple(replies.entries()),
        tuple(schedules.entries()),
        tuple(matched),
    )
    unions = (pools, replies, schedules, targets)
    others = [text for each in unions for text in each.conflicts]
    conflicts = [*queues.conflicts, *kept, *same, *others, *twice]
    if len(conflicts) > MAX_PROBLEMS:
        conflicts[MAX_PROBLEMS:] = [f"{len(conflicts) - MAX_PROBLEMS} more conflicts"]
    return config, conflicts


def limit_connections(
    config: RoutingConfig, most: int, running: RoutingConfig = NOTHING
) -> tuple[RoutingConfig, str]:
    """Return a configuration within a limit of connections, and what that costs.

    Queues with many give up some first. If there are more queues than connections, those that run
    already are kept, then the first ones.
    """
    wanted = sum(queue.connections for queue in config.queues)
    if wanted <= most:
        return config, ""
    names = {queue.name for queue in running.queues}
    by_age = sorted(config.queues, key=lambda queue: queue.name not in names)
    kept = {queue.name for queue in by_age[:most]}
    queues = [queue for queue in config.queues if queue.name in kept]
    each, widest = 1, max(queue.connections for queue in queues)
    while each < widest and sum(min(queue.connections, each + 1) for queue in queues) <= most:
        each += 1
    cut = [replace(queue, connections=min(queue.connections, each)) for queue in queues]
    skipped = len(config.queues) - len(queues)
    costs = f"{skipped} queues are skipped" if skipped else f"a queue gets at most {each}"
    text = f"the queues want {wanted} connections, more than MESSAGE_ROUTER_MAX_CONNECTIONS"
    return replace(config, queues=tuple(cut)), f"{text} ({most}): {costs}"


def plan(old: RoutingConfig, new: RoutingConfig) -> Plan:
    """Return what has to be done to get from what runs to what is wanted."""
    queues, wanted_queues = _by_name(old.queues), _by_name(new.queues)
    pools, wanted_pools = _by_name(old.pools), _by_name(new.pools)
    if DEFAULT_POOL in pools:
        # It is never drained: once named and then dropped, it gets its default values again.
        wanted_pools.setdefault(DEFAULT_POOL, DEFAULT_POOL_CONFIG)
    return Plan(
        start=_only_in(wanted_queues, queues),
        stop=_only_in(queues, wanted_queues),
        replace=tuple(_changed(queues, wanted_queues)),
        keep=tuple(queue for queue in new.queues if queues.get(queue.name) == queue),
        create=_only_in(wanted_pools, pools),
        drain=_only_in(pools, wanted_pools),
        change=tuple(_changed(pools, wanted_pools)),
        replies=tuple(_reply_lines(old, new)),
        schedules=tuple(_schedule_lines(old, new)),
        targets=tuple(_target_lines(old, new)),
    )


def _reply_lines(old: RoutingConfig, new: RoutingConfig) -> Iterator[str]:
    return _lines("reply queue", old.reply_queues, new.reply_queues, _started)


def _schedule_lines(old: RoutingConfig, new: RoutingConfig) -> Iterator[str]:
    def runs(schedule: Schedule) -> str:
        return _facts(schedule)["runs"]

    return _lines("schedule", old.schedules, new.schedules, runs, hidden="message")


def _target_lines(old: RoutingConfig, new: RoutingConfig) -> Iterator[str]:
    return _lines("target", old.targets, new.targets, lambda target: target.match)


def _lines(
    kind: str,
    old: Sequence[E],
    new: Sequence[E],
    added: Callable[[E], str],
    hidden: str = "credentials",
) -> Iterator[str]:
    """Yield what changes. `added`: what a new one is shown as; `hidden`: as in `_differences`."""
    before, after = _by_name(old), _by_name(new)
    for entry in _only_in(after, before):
        yield f"{kind} {entry.name}: add ({added(entry)})"
    for was, will in _changed(before, after):
        yield f"{kind} {will.name}: change ({_differences(was, will, hidden)})"
    for entry in _only_in(before, after):
        yield f"{kind} {entry.name}: remove"


def empties(old: RoutingConfig, new: RoutingConfig) -> bool:
    """Return whether a running router would be left without a queue (CFG-5)."""
    return bool(old.queues) and not new.queues


def check_document(body: bytes, naming: QueueNames, running: RoutingConfig | None) -> CheckReport:
    """Return what applying the document would change; against nothing if no router runs.

    Credentials are left out of the comparison: a running router does not show them.
    """
    old = _without_credentials(running or NOTHING)
    try:
        document = read_document(body, naming)
    except BadDocument as bad:
        return CheckReport((Problem(bad.path, Code.CONFIGURATION, bad.text),), ())
    new, conflicts = unite([("the document", document)], old)
    problems = [
        *document.problems,
        *(Problem("$", Code.CONFIG_CONFLICT, text) for text in conflicts),
    ]
    names = {queue.name for queue in new.queues}
    for schedule in new.schedules:
        if schedule.queue not in names:
            text = f"{schedule.name}: there is no queue {schedule.queue!r}"
            problems.append(Problem("$.schedules", Code.CONFIGURATION, text))
    if empties(old, new):
        problems.append(Problem("$.queues", Code.CONFIGURATION, EMPTYING))
    return CheckReport(tuple(problems), tuple(plan(old, _without_credentials(new)).lines()))


@dataclass(slots=True)
class _Union(Generic[T]):
    """The entries of one kind, each from the first document that has a say in it."""

    kind: str
    running: Mapping[str, T]
    taken: dict[str, tuple[str, T]] = field(default_factory=dict)
    conflicts: list[str] = field(default_factory=list)

    def add(self, source: str, entries: Iterable[T], skipped: Iterable[str]) -> None:
        """Take the entries of a document. What it skipped goes on as it runs."""
        for name, entry in _by_name(entries).items():
            first, held = self.taken.setdefault(name, (source, entry))
            if held != entry:
                used = f"that of {first}, which is used"
                text = f"{self.kind} {name!r} of {source} differs from {used}"
                self.conflicts.append(text)
        for name in skipped:
            if name in self.running:
                self.taken.setdefault(name, (source, self.running[name]))

    def entries(self) -> list[T]:
        return [entry for _, entry in self.taken.values()]


def _as_divided(
    entries: Iterable[QueueConfig],
    running: Mapping[str, QueueConfig],
    partitions: Mapping[str, int],
) -> tuple[list[QueueConfig], list[str]]:
    """Keep how many partitions an entry has, or had: groups would move (PART-4)."""
    kept: list[QueueConfig] = []
    conflicts: list[str] = []
    for entry in entries:
        before = running.get(entry.name, entry)
        if before is entry and entry.partitions is not None and entry.name in partitions:
            before = replace(entry, partitions=partitions[entry.name])
        kept.append(entry if before.partitions == entry.partitions else before)
        if before.partitions != entry.partitions:
            numbers = f"{before.partitions or 'no'} partitions, not {entry.partitions or 'none'}"
            conflicts.append(
                f"queue {entry.name!r} runs with {numbers}: it stays so, as groups would move to "
                "other queues. Let it run empty, take its entry out for a sync, and add it again"
            )
    return kept, conflicts


def _one_consumer_each(queues: Iterable[QueueConfig]) -> tuple[list[QueueConfig], list[str]]:
    """Leave out second names of a queue: two consumers would take each other's messages."""
    first_names: dict[str, str] = {}
    taken: set[str] = set()
    apart: list[QueueConfig] = []
    conflicts: list[str] = []
    for queue in queues:
        first = first_names.setdefault(queue.public_uri, queue.name)
        if queue.name in taken:
            conflicts.append(f"queue {queue.name!r} is there twice: one is a partition")
        elif first == queue.name:
            taken.add(queue.name)
            apart.append(queue)
        else:
            conflicts.append(f"queue {queue.name!r} is the same as {first!r}, which is used")
    return apart, conflicts


def _one_entry_each(targets: Iterable[TargetConfig]) -> tuple[list[TargetConfig], list[str]]:
    """Leave out second entries for the same URLs (TGT-1)."""
    first_names: dict[str, str] = {}
    apart: list[TargetConfig] = []
    conflicts: list[str] = []
    for target in targets:
        first = first_names.setdefault(target.match, target.name)
        if first == target.name:
            apart.append(target)
        else:
            conflicts.append(f"target {target.name!r} matches as {first!r} does, which is used")
    return apart, conflicts


def _by_name(entries: Iterable[T]) -> dict[str, T]:
    return {each.code if isinstance(each, PoolConfig) else each.name: each for each in entries}


def _only_in(these: Mapping[str, T], others: Mapping[str, T]) -> tuple[T, ...]:
    return tuple(entry for name, entry in these.items() if name not in others)


def _changed(before: Mapping[str, T], after: Mapping[str, T]) -> Iterator[tuple[T, T]]:
    for name, entry in after.items():
        if name in before and before[name] != entry:
            yield before[name], entry


def _without_credentials(config: RoutingConfig) -> RoutingConfig:
    entries, replies = (
        tuple(
            replace(
                queue,
                uri=queue.public_uri,
                routes=tuple((kind, route.without_secrets()) for kind, route in queue.routes),
            )
            for queue in some
        )
        for some in (entries_of(config.queues), config.reply_queues)
    )
    queues = all_queues(with_reply_names(entries, replies))
    schedules = tuple(
        replace(each, message=msgspec.json.encode(schedule_entry(each)["message"]))
        for each in config.schedules
    )
    return replace(config, queues=queues, reply_queues=replies, schedules=schedules)


Entry = QueueConfig | PoolConfig | TargetConfig | Schedule


def _differences(old: Entry, new: Entry, hidden: str = "credentials") -> str:
    before, after = _facts(old), _facts(new)
    changes = [
        f"{name} {fact} → {after[name]}" for name, fact in before.items() if fact != after[name]
    ]
    return ", ".join(changes) or hidden  # shown alike, they differ in what is not shown


def _hidden_in(old: QueueConfig, new: QueueConfig) -> str:
    """Return what differs if two queues are shown alike."""
    return "credentials" if old.route == new.route else "route"


def _started(queue: QueueConfig) -> str:
    raw = "" if queue.route is None else f", raw to {mask_urls(queue.route.target)}"
    retry = "" if queue.retry is None else f", retry {_shown_policy(queue.retry)}"
    return f"{queue.public_uri}{raw}{retry}"


def _described(pool: PoolConfig) -> str:
    facts = _facts(pool)
    shown = ["concurrency", "rate per minute", *(["retry"] if pool.retry else [])]
    return ", ".join(f"{name} {facts[name]}" for name in shown)


def _facts(entry: Entry) -> dict[str, str]:
    if isinstance(entry, Schedule):
        every, cron = entry.every_seconds, f"{entry.cron} {entry.timezone}"
        return {"queue": entry.queue, "runs": cron if every is None else f"every {every} s"}
    fields = msgspec.structs.asdict(entry)
    if isinstance(entry, QueueConfig):
        del fields["broker"], fields["entry"]  # the URI tells
        fields["uri"] = entry.public_uri
        fields["route"] = None if entry.route is None else mask_urls(entry.route.target)
    return {name.replace("_", " "): _shown(value) for name, value in fields.items()}


def _shown(value: object) -> str:
    match value:
        case None:
            return "none"
        case str():
            return value
        case float():
            return f"{value:g} s"
        case RetryPolicy():
            return _shown_policy(value)
        case tuple():  # routes, names of reply queues, and headers
            places = [(name, to.target if isinstance(to, Route) else to) for name, to in value]
            return ", ".join(f"{name} to {mask_urls(place)}" for name, place in places) or "none"
        case _:
            return str(value.value if isinstance(value, Enum) else value).lower()


def _shown_policy(policy: RetryPolicy) -> str:
    attempts = (
        "unlimited attempts" if policy.max_attempts is None else f"{policy.max_attempts} attempts"
    )
    delays = "exponential"
    if policy.schedule is not None:
        delays = f"after {[float(delay) for delay in policy.schedule]} s"
    statuses = f", also on {sorted(policy.statuses)}" if policy.statuses else ""
    return f"{attempts} {delays}{statuses}"
