"""Which test proves which rule of the specification, read from the tests themselves.

`./dev rules` prints the table.
"""

import ast
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

TESTS: Final = Path(__file__).parent.parent

REQUIRED: Final[Mapping[str, str]] = {
    "P1": "at least once: nothing is lost, whenever the process dies",
    "P2": "a message is never delivered twice at once",
    "P3": "group order, and never two of a group at once",
    "P4": "memory is bounded, whatever waits in the brokers",
    "P5": "one bad target, message, group, pool, queue or document stops no other",
    "CFG-1": "settings from the environment, checked at start",
    "CFG-2": "when the configuration is fetched",
    "CFG-3": "attempts of one sync, and what a failed one means",
    "CFG-4": "several sources are united",
    "CFG-5": "a document is checked as a whole, a bad entry skipped",
    "CFG-6": "pools come, change and go",
    "CFG-7": "queues come, change and go",
    "CFG-8": "syncs never overlap; reload and check on demand",
    "CFG-9": "standby and disabled routers consume nothing",
    "CFG-10": "several routers work, each on the queues whose leases it has",
    "PART-1": "one entry for several queues, and what is wrong with it",
    "PART-2": "each group is published to its partition",
    "PART-3": "views name the partition, and add up the entry",
    "PART-4": "a running entry keeps its number of partitions",
    "BRK-1": "receiving, and when a consumer is healthy",
    "BRK-2": "malformed bodies become dead letters",
    "BRK-3": "settling by the newest live handle, in batches",
    "BRK-4": "delays of a NACK",
    "BRK-5": "leases are kept alive",
    "BRK-6": "lost connections are opened again",
    "BRK-7": "delivery limits lose no message",
    "BRK-8": "brokers describe themselves, and packages outside add some",
    "BRK-9": "when a message was published",
    "ID-1": "the key of a message, by its broker's id or by its body",
    "ID-2": "equal keys with different bodies are two messages",
    "ID-3": "nothing is dropped because it looks like something else",
    "ROUTE-1": "the key of a message in the pipeline",
    "ROUTE-2": "redelivered copies",
    "ROUTE-3": "requeued copies",
    "ROUTE-4": "which pool",
    "ROUTE-5": "capacity",
    "ROUTE-6": "order within a batch",
    "ROUTE-7": "tracked before submitted, untracked after settled",
    "TRK-1": "leaks of the tracker are noticed",
    "POOL-1": "capacity of a pool, and what counts against it",
    "POOL-2": "one task per group, none for an idle one",
    "POOL-3": "high priority goes first",
    "POOL-4": "rate limit, then permit, then delivery",
    "POOL-5": "a task that dies is replaced",
    "POOL-6": "effective concurrency, changed in place",
    "POOL-7": "dispatch modes",
    "SHARE-1": "targets or tenants share the workers of a pool",
    "FIFO-1": "a failure holds back the rest of its batch's group",
    "LIM-1": "several routers share one rate",
    "LIM-2": "routers take shares of limits",
    "RAW-1": "raw queues: any body goes to the route as it came",
    "RAW-2": "where ids, groups and headers of raw messages are found",
    "RAW-3": "the key of a raw message",
    "RAW-4": "raw messages keep body and attributes wherever they are stored",
    "MSG-1": "how one message is sent",
    "MSG-2": "when it is too late",
    "ORD-1": "strict queues, and where a failed message waits",
    "ORD-2": "a strict queue has one consumer",
    "ORD-4": "groups are direct or stored",
    "ORD-5": "messages of a stored group are appended to the store",
    "ORD-6": "a failed message moves to the store with its group",
    "ORD-7": "a store that is away or full holds strict queues up, and loses nothing",
    "ORD-8": "the copy in the store is the message",
    "ORD-10": "a stop returns direct messages; stored ones stay",
    "ORD-12": "what was stored is in the ledger",
    "ORD-14": "operators see groups that wait, and release those that are held",
    "MED-1": "the request",
    "MED-2": "attempts",
    "MED-3": "what a reply means",
    "MED-4": "circuit breaker",
    "GATE-1": "a target that asks for silence gets it",
    "GATE-2": "a busy target gets what it takes",
    "GATE-3": "a target that is back starts slowly",
    "GATE-4": "second and third attempts have a budget",
    "GATE-5": "lanes wait for a place at their target",
    "TGT-1": "entries of targets, by the longest prefix",
    "TGT-2": "ceilings of a target for all pools together",
    "TGT-3": "the credentials file",
    "TGT-4": "a secret goes to its hosts and nowhere else",
    "TGT-5": "a 401 to the router's own credentials, and tokens",
    "TGT-6": "rotation without a restart, and no secret is shown",
    "TGT-7": "client certificates and private authorities",
    "TGT-8": "bodies: message, payload, CloudEvents; methods",
    "TGT-9": "signatures: Standard Webhooks, AWS",
    "TGT-10": "one request to test a target",
    "MED-5": "target safety",
    "DLQ-1": "dead letters are kept",
    "DLQ-2": "dead letters are listed, replayed, discarded",
    "WQ-1": "publishing is durable and idempotent",
    "WQ-2": "claims",
    "WQ-3": "settling needs the lease token",
    "WQ-4": "expired leases are claimable again",
    "WQ-5": "retry policy",
    "CMD-8": "processes as targets",
    "CMD-9": "handlers as a library",
    "OPS-1": "scheduled work",
    "OPS-2": "warnings",
    "OPS-3": "health",
    "OPS-4": "shutdown",
    "OPS-5": "logs",
    "OPS-6": "the ledger balances",
    "OPS-7": "the event loop is watched",
    "SIM-1": "a seed decides a whole world",
    "SIM-2": "what is checked in every world, from outside and by body",
    "SIM-3": "the models behave as the real brokers",
}
OPTIONAL: Final[Mapping[str, str]] = {
    "CMD-1": "payload and correlation id reach the target",
    "CMD-2": "result and state of a message",
    "CMD-3": "replies",
    "CMD-4": "batches with a callback",
    "CMD-5": "scheduled messages",
    "CMD-6": "priority, dedup by key and content",
    "CMD-7": "PGMQ queues",
    "CMD-10": "recurring schedules",
    "CMD-11": "chains",
    "CMD-12": "what a command is",
    "CMD-13": "cancel what runs",
    "CMD-14": "states of messages on PGMQ",
    "FIFO-2": "strict order",
    "ORD-3": "what the last owner had in hand comes first",
    "ORD-9": "a silent connection counts as lost",
    "ORD-11": "a dead letter may hold its group",
    "ORD-13": "a shared queue goes through the store",
    "WQ-6": "waking consumers",
    "WQ-7": "replies and batches",
    "WQ-8": "audit rows",
    "WQ-9": "PGMQ queues",
    "WQ-10": "what a dead worker held comes back at once",
    "WQ-11": "clocks that are set strand nothing and hand out nothing twice",
    "WQ-12": "queues of the version before are upgraded in place, and nothing is lost",
    "WQ-14": "attempts are deliveries, numbered by failures",
    "WQ-15": "a limit by default",
    "WQ-13": "a storage that refuses writes is reported until it takes them again",
}
RULES: Final = {**REQUIRED, **OPTIONAL}


@dataclass(frozen=True, slots=True, order=True)
class Proof:
    """One test that claims to prove one rule."""

    rule: str
    test: str  # as pytest names it


class BadMark(ValueError):
    """A rule mark whose ids are not plain strings, or that stands on a module, not on a test."""


def proofs_in(source: str, path: str) -> Iterator[Proof]:
    """Yield every (rule, test) of one test module."""
    module = ast.parse(source, path)
    for statement in module.body:
        if isinstance(statement, ast.Assign) and "pytestmark" in _names(statement):
            for _ in _rules(statement.value, path):
                raise BadMark(f"{path}:{statement.lineno}: mark the tests, not the module")
    for test, rules in _tests(module.body, path, []):
        yield from (Proof(rule, f"{path}::{test}") for rule in sorted(set(rules)))


def all_proofs(tests: Path = TESTS) -> list[Proof]:
    root = tests.parent
    return sorted(
        proof
        for path in tests.rglob("test_*.py")
        for proof in proofs_in(path.read_text(), path.relative_to(root).as_posix())
    )


def render(proofs: Iterable[Proof]) -> str:
    """Return the table as a page."""
    tests_of: dict[str, list[str]] = defaultdict(list)
    for proof in proofs:
        tests_of[proof.rule].append(proof.test)
    sections = (
        f"## {rule}: {title}\n\n" + "".join(f"- `{test}`\n" for test in sorted(tests_of[rule]))
        for rule, title in RULES.items()
        if rule in REQUIRED or tests_of[rule]
    )
    return "# Rules and the tests that prove them\n\n" + "\n".join(sections)


def _tests(
    body: Iterable[ast.stmt], path: str, inherited: list[str]
) -> Iterator[tuple[str, list[str]]]:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                if name.startswith("test"):
                    yield name, inherited + _decorations(node, path)
            case ast.ClassDef(name=name) if name.startswith("Test"):
                inner = _tests(node.body, path, inherited + _decorations(node, path))
                yield from ((f"{name}::{test}", rules) for test, rules in inner)
            case ast.Assign():
                # `TestQueue = QueueMachine.TestCase`: how a hypothesis machine becomes a test.
                rules = [*inherited, *_rules(node.value, path)]
                yield from ((name, rules) for name in _names(node) if name.startswith("Test"))


def _names(assignment: ast.Assign) -> set[str]:
    return {target.id for target in assignment.targets if isinstance(target, ast.Name)}


def _decorations(
    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, path: str
) -> list[str]:
    return [rule for decorator in node.decorator_list for rule in _rules(decorator, path)]


def _rules(marks: ast.expr, path: str) -> Iterator[str]:
    """Yield the ids of every `pytest.mark.rule(...)` in an expression: marks may be nested."""
    for node in ast.walk(marks):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.rule":
            for argument in node.args:
                if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                    raise BadMark(f"{path}:{argument.lineno}: name the rule as plain text")
                yield argument.value


if __name__ == "__main__":
    sys.stdout.write(render(all_proofs()))
