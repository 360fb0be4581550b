"""A world that is being drawn: who publishes what, and what goes wrong."""

import random
from typing import Final

from msgspec import Struct, field

from tests.simulation.plan import (
    DEDUP_WINDOW,
    HOSTS,
    MAX_PAUSE,
    SETTLED_WITHIN,
    WORK_QUEUES,
    YEAR,
    Act,
    Body,
    Kind,
    Step,
)

FAULTS: Final = (
    Act.KILL,
    Act.KILL,
    Act.KILL,
    Act.PAUSE,
    Act.STALL,
    Act.OUTAGE,
    Act.BREAK,
    Act.LOSSES,
    Act.LOSSES,
    Act.HANGS,
    Act.SLOW,
    Act.CLOCK,
    Act.STORE,
    Act.REPLAY,
    Act.POOLS,
)
LATER: Final = (SETTLED_WITHIN + 5,) * 3 + (DEDUP_WINDOW - 10, 900.0)
FLOOD: Final = 40  # messages of one call
CLOCK_STEPS: Final = (-YEAR, -3600.0, -40.0, 40.0, 3600.0, YEAR)


class Drawer(Struct):
    rng: random.Random
    kind: Kind
    routers: int
    queues: int
    bodies: list[Body] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def publish(self, at: float, *bodies: Body, queue: int | None = None) -> None:
        by_router = self.kind in WORK_QUEUES or self.rng.random() < 0.5
        self.steps.append(
            Step(
                at,
                Act.SEND if by_router else Act.PUBLISH,
                tuple(body.number for body in bodies),
                queue=self.rng.randrange(self.queues) if queue is None else queue,
                router=self.rng.randrange(self.routers),
            )
        )

    def body(self, message_id: str, *, like: Body | None = None) -> Body:
        """A new one; `like`: it belongs to the same place as that."""
        rng = self.rng
        number = len(self.bodies)
        if like is not None and rng.random() < 0.7:
            drawn = Body(number, message_id, like.host, like.pool, like.group, like.dispatch)
        else:
            mode = rng.choice((None, None, None, "NEXT_ON_ERROR", "IMMEDIATE"))
            group = rng.choice((None, "g", "g", "h"))
            drawn = Body(
                number,
                message_id,
                rng.randrange(HOSTS),
                rng.choice((None, "P", "P", "Q", "Q", "R", "unknown")),
                None if mode == "IMMEDIATE" else group,
                mode,
                high=rng.random() < 0.15,
                malformed=rng.random() < 0.05,
            )
        self.bodies.append(drawn)
        return drawn

    def produce(self, at: float) -> None:
        """One producer does something, and maybe something about it later."""
        rng = self.rng
        body = self.body(f"m{len(self.bodies)}")
        pick = rng.random()
        queue = rng.randrange(self.queues)
        if pick < 0.35:
            self.publish(at, body, queue=queue)
        elif pick < 0.55:  # the id again, for another content: an order created, an order paid
            self.publish(at, body, queue=queue)
            again = self.body(body.id, like=body)
            self.publish(at + rng.choice((0.0, 0.5, 5.0, 40.0)), again)
        elif pick < 0.7:  # a true duplicate
            self.publish(at, body, queue=queue)
            self.publish(at + rng.choice((0.0, 0.01, 1.0, 31.0)), body)
        elif pick < 0.88:  # the same once more, much later, as after a death
            self.publish(at, body, queue=queue)
            later = rng.choice(LATER)
            self.publish(at + later, body, queue=queue)
        else:  # one call, one id, two targets
            other = self.body(body.id)
            self.publish(at, body, other, queue=queue)

    def flood(self, at: float) -> None:
        """More than a pool holds, in a few calls."""
        pool = self.rng.choice(("P", "R", "R"))
        for _ in range(3):
            first = len(self.bodies)
            group = self.rng.choice((None, "g"))
            for number in range(first, first + FLOOD):
                mode = None if group else "IMMEDIATE"
                self.bodies.append(Body(number, f"m{number}", 0, pool, group, mode))
            self.publish(at, *self.bodies[first:])

    def fault(self, at: float) -> None:
        rng = self.rng
        act = rng.choice(FAULTS)
        seconds = rng.choice((0.5, 3.0, 12.0, 35.0))
        if act is Act.CLOCK:
            seconds = rng.choice(CLOCK_STEPS)
        elif act in {Act.PAUSE, Act.STALL}:
            seconds = rng.choice((2.0, 31.0, 65.0, MAX_PAUSE))
        if act is Act.KILL and self.kind is Kind.SQLITE and rng.random() < 0.4:
            act = rng.choice((Act.RECREATE, Act.REBOOT))
        share = rng.choice((0.1, 0.3, 0.6))
        router = rng.randrange(self.routers)
        self.steps.append(Step(at, act, router=router, seconds=seconds, share=share))
