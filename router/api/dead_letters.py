"""`/dead-letters`: list, show, replay and discard what could not be delivered (DLQ-2)."""

from datetime import UTC, datetime
from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Query, Request
from msgspec import Struct
from pydantic import Field

from router.api.body import decode, read_body
from router.api.parameters import BLANK_IS_NONE
from router.api.problems import Problem
from router.api.router_api import RouterApi
from router.api.views import Discarded, LetterDetail, LetterPage, LetterView, Replayed, ReplayedMany
from router.core.dead_letter import KeptLetter, LetterFilter, Reason

MAX_PAGE: Final = 1000
_ID_DIGITS: Final = 18  # of what SQLite can hold

Name = Annotated[str | None, BLANK_IS_NONE]
Cursor = Annotated[int, Field(ge=1, lt=10**_ID_DIGITS)]


async def letter_filter(
    queue: Name = None,
    pool: Name = None,
    reason: Annotated[Reason | None, BLANK_IS_NONE] = None,
    target: Name = None,
    since: Annotated[datetime | None, BLANK_IS_NONE] = None,
) -> LetterFilter:
    seconds = None if since is None else _unix(since)
    return LetterFilter(queue=queue, pool=pool, reason=reason, target=target, since=seconds)


Wanted = Annotated[LetterFilter, Depends(letter_filter)]


class Order(Struct, rename="camel"):
    """A replay's parameters as JSON. To ignore its filters would be to replay everything."""

    queue: str | None = None
    pool: str | None = None
    reason: Reason | None = None
    target: str | None = None
    since: datetime | None = None
    to: str | None = None
    dry_run: bool = False
    force: bool = False

    def narrowed(self, wanted: LetterFilter) -> LetterFilter:
        return LetterFilter(
            queue=self.queue or wanted.queue,
            pool=self.pool or wanted.pool,
            reason=self.reason or wanted.reason,
            target=self.target or wanted.target,
            since=wanted.since if self.since is None else _unix(self.since),
        )


_ORDERS: Final = msgspec.json.Decoder(Order)


def dead_letter_routes(router: RouterApi) -> APIRouter:
    routes = APIRouter(prefix="/dead-letters", tags=["dead letters"])

    @routes.get("")
    async def list_letters(
        wanted: Wanted,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = 100,
        cursor: Annotated[Cursor | None, BLANK_IS_NONE] = None,
    ) -> LetterPage:
        """Newest first; `next` is the cursor of the page after this."""
        found = await router.letters.find(wanted, limit=limit + 1, before=cursor)
        page = found[:limit]
        more = str(page[-1].id) if len(found) > limit else None
        return LetterPage(items=[LetterView.of(kept) for kept in page], next=more)

    @routes.get("/{letter_id}")
    async def show(letter_id: str) -> LetterDetail:
        """With the message as far as it may be shown: never its token, secret or body."""
        return LetterDetail.of(await _letter(letter_id))

    @routes.post("/replay")
    async def replay_many(
        request: Request,
        wanted: Wanted,
        to: Name = None,
        dry_run: Annotated[bool, Query(alias="dryRun")] = False,
        force: bool = False,
    ) -> ReplayedMany:
        """Publish all that fit, oldest first: to their own queues, or to the queue named `to`.

        When one fails, the later ones of its group stay dead letters. All parameters may also stand
        in a JSON body.
        """
        order = _order(await read_body(request))
        dry_run = dry_run or order.dry_run
        report = await router.replays.replay_all(
            order.narrowed(wanted),
            to=order.to or to,
            force=force or order.force,
            dry_run=dry_run,
        )
        return ReplayedMany.of(report, dry_run=dry_run)

    @routes.post("/{letter_id}/replay")
    async def replay(letter_id: str, to: Name = None, force: bool = False) -> Replayed:
        """Publish it to the queue it came from, or to the one named `to`.

        A second replay needs `force`. A letter whose queue is gone needs `to`.
        """
        await router.replays.replay(_number(letter_id), to=to, force=force)
        return Replayed(replayed=1)

    @routes.delete("/{letter_id}")
    async def discard(letter_id: str) -> Discarded:
        if not await router.letters.discard(_number(letter_id)):
            raise _unknown()
        return Discarded(discarded=1)

    async def _letter(letter_id: str) -> KeptLetter:
        kept = await router.letters.get(_number(letter_id))
        if kept is None:
            raise _unknown()
        return kept

    return routes


def _order(body: bytes) -> Order:
    return decode(_ORDERS, body) if body.strip() else Order()


def _number(letter_id: str) -> int:
    """What is no number, or none that the store can have given, is no letter's id."""
    if not (letter_id.isascii() and letter_id.isdigit() and len(letter_id) <= _ID_DIGITS):
        raise _unknown()
    return int(letter_id)


def _unknown() -> Problem:
    return Problem(HTTPStatus.NOT_FOUND, "there is no such dead letter")


def _unix(moment: datetime) -> float:
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
