"""Draws what producers ask for beside a delivery: replies, batches, chains, times (CMD-1 to 11)."""

import random
from typing import Final

from msgspec import field
from msgspec.structs import replace

from tests.simulation.drawing import LATER, Drawer
from tests.simulation.plan import (
    HIGH,
    HOSTS,
    WORK_QUEUES,
    Act,
    Beats,
    Body,
    Kind,
    PlannedBatch,
    Step,
    Wish,
    WorldPlan,
)

WAITS: Final = (2.0, 2.0, 15.0, 70.0)
LONG_WAIT: Final = 950.0  # SQS itself delays for at most 900 s
# Who waits for a time of the calendar waits for longer if the clock is set back.
FURTHEST_BACK: Final = -40.0
WITH_LEASES: Final = frozenset({Kind.POSTGRES, Kind.SQS, Kind.SQS_FIFO, Kind.NATS})
CANCELLED_AFTER: Final = (0.0, 0.01, 0.3, 1.0, 5.0, 20.0)


def draw_commands(rng: random.Random, plan: WorldPlan) -> WorldPlan:
    """Let producers of this world send commands as well, and more go wrong about them."""
    drawing = CommandDrawer(
        rng, plan.kind, plan.routers, plan.queues, list(plan.bodies), list(plan.steps)
    )
    latest = max(step.at for step in plan.steps if step.is_of_a_producer)
    span = min(latest, rng.choice((2.0, 20.0, 60.0)))
    for _ in range(rng.choice((1, 2, 3, 5))):
        drawing.produce_command(round(rng.random() * span, 3))
    if drawing.is_work_queue and rng.random() < 0.25:
        drawing.draw_beats()
    asked = [step.at for step in drawing.steps[len(plan.steps) :]]
    for _ in range(rng.choice((0, 1, 1, 2, 3))):
        at = rng.choice(asked) + rng.choice((0.0, 0.01, 0.1, 1.0, 5.0)) + rng.random() / 50
        drawing.fault(round(at, 3))
    for step in drawing.steps[len(plan.steps) :]:
        if step.is_of_a_producer:
            drawing.trouble(step, plan.lease)
    return replace(
        plan,
        bodies=tuple(drawing.bodies),
        steps=tuple(sorted(map(_not_far_back, drawing.steps), key=lambda step: step.at)),
        batches=tuple(drawing.batches),
        beats=tuple(drawing.beats),
        replies_elsewhere=drawing.is_work_queue and rng.random() < 0.4,
    )


def _not_far_back(step: Step) -> Step:
    if step.act is not Act.CLOCK:
        return step
    return replace(step, seconds=max(step.seconds, FURTHEST_BACK))


class CommandDrawer(Drawer):
    batches: list[PlannedBatch] = field(default_factory=list)
    beats: list[Beats] = field(default_factory=list)

    @property
    def is_work_queue(self) -> bool:
        return self.kind in WORK_QUEUES

    def produce_command(self, at: float) -> None:
        rng = self.rng
        pick = rng.random()
        if self.is_work_queue and pick < 0.4:
            self._open_batch(at)
        elif self.is_work_queue and pick < 0.5:
            self._same_content(at)
        else:
            self._one_command(at)

    def draw_beats(self) -> None:
        rng = self.rng
        for number in range(rng.choice((1, 1, 2))):
            self.beats.append(
                Beats(
                    f"s{number}",
                    rng.randrange(self.queues),
                    rng.choice((10, 20, 60)),
                    rng.randrange(HOSTS),
                    rng.choice((None, "P", "Q")),
                )
            )

    def trouble(self, step: Step, lease: float) -> None:
        """What matters most about what a message asks for: its end is not heard, or too late."""
        rng = self.rng
        at = round(step.at + rng.choice((0.02, 0.1, 0.5)), 3)
        if step.act is Act.BATCH and rng.random() < 0.5:
            seconds, share = rng.choice((3.0, 12.0)), rng.choice((0.3, 0.6))
            self.steps.append(Step(at, Act.LOSSES, seconds=seconds, share=share))
        elif self.kind in WITH_LEASES and rng.random() < 0.15:
            self.steps.append(Step(at, Act.OUTAGE, seconds=lease + 10))

    def _one_command(self, at: float) -> None:
        rng = self.rng
        body, queue = self._command(self._wish(at), steps=2), rng.randrange(self.queues)
        self.publish(at, body, queue=queue)
        pick = rng.random()
        if self.is_work_queue and pick < 0.3:
            self._cancel(at + rng.choice(CANCELLED_AFTER), body, queue)
        elif pick < 0.4:  # a true duplicate
            self.publish(at + rng.choice((0.0, 0.01, 1.0)), body, queue=queue)
        elif pick < 0.5:  # once more, much later
            self.publish(at + rng.choice(LATER), body, queue=queue)
        elif pick < 0.65:  # the id again, for another content
            again = replace(self._command(self._wish(at), steps=1), id=body.id)
            self.bodies[again.number] = again
            self.publish(at + rng.choice((0.0, 0.5, 5.0)), again, queue=queue)

    def _same_content(self, at: float) -> None:
        first = self._command(Wish(payload=self.rng.randrange(9), by_content=True))
        number, queue = len(self.bodies), self.rng.randrange(self.queues)
        payload = self.rng.choice((first.wish.payload, first.wish.payload, 10))
        wish = replace(first.wish, payload=payload)
        second = replace(first, number=number, id=f"m{number}", wish=wish)
        self.bodies.append(second)
        self.publish(at, first, queue=queue)
        self.publish(at + self.rng.choice((0.0, 1.0, 20.0, *LATER)), second, queue=queue)

    def _open_batch(self, at: float) -> None:
        rng = self.rng
        queue, router = rng.randrange(self.queues), rng.randrange(self.routers)
        index = len(self.batches)
        callback = self._command(Wish(reply=rng.random() < 0.3))
        self.bodies[callback.number] = replace(callback, id=f"b{index}-callback")
        members = [self._command(self._wish(at)) for _ in range(rng.choice((1, 1, 2, 3, 5)))]
        numbers = tuple(body.number for body in members)
        is_sized = len(members) > 1 and rng.random() < 0.5
        self.batches.append(PlannedBatch(f"b{index}", queue, numbers, callback.number, is_sized))
        first = numbers[: rng.randrange(len(numbers))] if is_sized else numbers
        self.steps.append(Step(at, Act.BATCH, first, queue, router, batch=index))
        if is_sized:
            later = round(at + rng.choice((0.5, 5.0, 40.0)), 3)
            rest = numbers[len(first) :]
            self.steps.append(Step(later, Act.ADD, rest, queue, router, batch=index))
        if rng.random() < 0.3:
            self._cancel(at + rng.choice(CANCELLED_AFTER), rng.choice(members), queue)

    def _cancel(self, at: float, body: Body, queue: int) -> None:
        router = self.rng.randrange(self.routers)
        self.steps.append(Step(round(at, 3), Act.CANCEL, (body.number,), queue, router))

    def _wish(self, at: float, *, is_step: bool = False) -> Wish:
        rng = self.rng
        waits = (*WAITS, LONG_WAIT) if self.kind is Kind.SQS else WAITS
        wait = rng.choice(waits) if rng.random() < 0.3 else None
        is_delay = is_step or rng.random() < 0.5
        return Wish(
            payload=rng.choice((None, rng.randrange(9))),
            reply=rng.random() < 0.6,
            delay=wait if is_delay else None,
            due=None if is_delay or wait is None else at + wait,
            priority=rng.choice((None, None, 0, 5, HIGH)),
            pass_result=is_step and rng.random() < 0.5,
        )

    def _command(self, wish: Wish, *, steps: int = 0) -> Body:
        """A new one, with at most so many steps one after the other behind it."""
        rng = self.rng
        number = len(self.bodies)
        self.body(f"m{number}")
        then: tuple[Body, ...] = ()
        if steps and rng.random() < 0.5:
            then = tuple(
                self._command(self._wish(0.0, is_step=True), steps=steps - 1)
                for _ in range(rng.choice((1, 1, 2)))
            )
        body = replace(self.bodies[number], malformed=False, wish=wish, then=then)
        self.bodies[number] = body
        return body
