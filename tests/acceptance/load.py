"""A load of many groups, the target that takes it, and whether it came whole and in order."""

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tests.acceptance.process import RouterProcess, eventually
from tests.acceptance.targets import Gate, id_of, ids, message
from tests.outbound.servers import Connection, LoopbackTarget

BATCH = 1000  # messages in one call of the API


def load(url: str, groups: int, per_group: int) -> list[dict[str, object]]:
    """Messages for the pool LOAD, of all groups in turn. The id of one is `group:number`."""
    return [
        {
            "id": f"{group}:{number:03}",
            "mediationTarget": url,
            "poolCode": "LOAD",
            "messageGroupId": f"g{group}",
        }
        for number in range(per_group)
        for group in range(groups)
    ]


async def publish_all(router: RouterProcess, messages: Sequence[dict[str, object]]) -> None:
    for start in range(0, len(messages), BATCH):
        await router.publish(messages[start : start + BATCH])


async def stop_at_the_first(router: RouterProcess, gate: Gate, target: LoopbackTarget) -> int:
    """Stop the router while it delivers the first of five messages of a group. Return its code."""
    await router.publish([message(f"m{n}", target, group="g") for n in range(5)])
    await eventually(lambda: ids(target) == ["m0"])
    stopping = asyncio.ensure_future(router.stop())
    await router.logs("shutting down")
    gate.open()
    return await stopping


@dataclass
class AcceptingTargets:
    """A target that takes 10 ms for each request."""

    accepted: list[str] = field(default_factory=list)

    async def script(self, connection: Connection) -> None:
        while True:
            request = await connection.read()
            await asyncio.sleep(0.01)
            self.accepted.append(id_of(request))
            await connection.reply()


def group_of(message_id: str) -> str:
    return message_id.partition(":")[0]


def repeated(accepted: Iterable[str]) -> set[str]:
    return {each for each, times in Counter(accepted).items() if times > 1}


def are_all_there(accepted: Iterable[str], messages: Iterable[dict[str, object]]) -> bool:
    return set(accepted) == {str(each["id"]) for each in messages}


def firsts_in_order(accepted: Iterable[str], groups: int, per_group: int) -> bool:
    """Whether all were accepted, and for the first time in the order of their groups."""
    numbers: dict[str, list[int]] = {str(group): [] for group in range(groups)}
    for each in dict.fromkeys(accepted):
        numbers[group_of(each)].append(int(each.partition(":")[2]))
    return all(found == list(range(per_group)) for found in numbers.values())
