"""`/dead-letters`: list, show, replay and discard what could not be delivered (DLQ-2)."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Query, Request
from msgspec import Struct
from pydantic import BeforeValidator, ConfigDict

from router.api.kit import (
    AT,
    BLANK_IS_NONE,
    ID_DIGITS,
    MAX_PAGE_ITEMS,
    CurrentRouter,
    Cursor,
    EnumName,
    Masked,
    Moment,
    Name,
    Private,
    RequestBody,
    ResponseModel,
    Time,
    as_is,
    body_schema,
    read_json,
    shown,
    unix_time,
    unprocessable,
)
from router.core.dead_letter import KeptLetter, LetterFilter, Reason
from router.core.message import Malformed, Message, parse
from router.core.raw import letter_source
from router.core.redact import MASK
from router.core.replay import TargetChange
from router.engine.dead_letters import NO_SUCH_LETTER, REPLAYED_BEFORE
from router.ports import Unknown

Text = Annotated[str, BeforeValidator(lambda reply: reply.decode(errors="replace"))]
Length = Annotated[int, BeforeValidator(len)]
BodyLength = Annotated[int, BeforeValidator(lambda body: len(letter_source(body)[1]))]
Hidden = Annotated[str | None, BeforeValidator(lambda secret: MASK if secret else None)]


def _parsed(body: bytes) -> Message | None:
    """Return None for a malformed one: a secret may be anywhere in it, so none of it is shown."""
    try:
        return parse(body)
    except Malformed:
        return None


class RawView(ResponseModel):
    """Facts about a message of a raw queue. Values may be secrets."""

    content_type: str | None = shown("content_type", "application/json")
    group: str | None = shown("group", None)
    subject: str | None = shown("subject", None)
    attributes: Annotated[Sequence[str], BeforeValidator(sorted)] = shown("attributes", ["type"])
    body_bytes: Length = shown("body", 182)


class _RawLetter(Struct):
    content_type: str | None
    group: str | None
    subject: str | None
    attributes: Sequence[str]
    body: bytes


def _raw(body: bytes) -> _RawLetter | None:
    source, content = letter_source(body)
    if source is None:
        return None
    names = [*source.attributes, *source.binary]
    return _RawLetter(source.content_type, source.group, source.subject, names, content)


class LetterView(ResponseModel):
    id: int = as_is(17)
    message_id: str | None = shown("letter.message_id", "0HZXEQ5Y8JY5Z")
    queue: str = shown("letter.queue", "orders")
    pool: str | None = shown("letter.pool", "POOL-A")
    target: Masked | None = shown("letter.target", "https://svc/api/process")
    reason: EnumName = shown("letter.reason", "CONFIG_ERROR")
    http_status: int | None = shown("letter.http_status", 404)
    reply: Private[Text] = shown(
        "letter.reply", "no such path", "The first KiB of the target's answer"
    )
    error: Private[Masked] = shown("letter.error", "HTTP 404", "May quote the target")
    failures: int = shown(
        "letter.failures", 1, "Failed deliveries that count towards the retry limit"
    )
    requests: int = shown("letter.requests", 1, "Requests to the target")
    attempts: int = shown("letter.failures", 1, "The same as `failures`")
    first_seen: Time = shown("letter.first_seen", AT)
    dead_at: Time = shown("letter.dead_at", AT)
    replayed_at: Time | None = as_is(None)


class LetterPage(ResponseModel):
    items: Sequence[LetterView] = as_is([])
    next: str | None = as_is("16", "The cursor of the next page")


class MessageView(ResponseModel):
    id: str = as_is("0HZXEQ5Y8JY5Z")
    pool_code: str | None = shown("pool", "POOL-A")
    mediation_target: Masked = shown("target", "https://svc/api/process")
    message_group_id: str | None = shown("group", "order-12345")
    high_priority: Annotated[bool, BeforeValidator(bool)] = as_is(example=False)
    dispatch_mode: str | None = shown("dispatch", "IMMEDIATE")
    auth_token: Hidden = shown("token", MASK)
    signing_secret: Hidden = shown("secret", None)


class LetterDetail(LetterView):
    """A dead letter with its message, as far as it may be shown."""

    body_bytes: BodyLength = shown("letter.body", 182)
    message: Annotated[MessageView | None, BeforeValidator(_parsed)] = shown(
        "letter.body", None, "null if it is malformed"
    )
    raw: Annotated[RawView | None, BeforeValidator(_raw)] = shown(
        "letter.body", None, "null unless its queue is raw"
    )


class Replayed(ResponseModel):
    replayed: int = as_is(1)


class ReplayedMany(ResponseModel):
    """The changes made, or in a dry run, those that would be made."""

    replayed: int = as_is(12)
    skipped: int = as_is(2)
    reasons: Mapping[str, int] = as_is({REPLAYED_BEFORE: 2}, "Why letters were skipped")
    dry_run: bool = as_is(example=False)


class Discarded(ResponseModel):
    discarded: int = as_is(1)


class ReplayOrder(RequestBody):
    """The parameters of a replay as JSON."""

    # A misspelled `dryRun` would be a replay.
    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"reason": "CONFIG_ERROR"}}
    )

    queue: str | None = None
    pool: str | None = None
    reason: Reason | None = None
    target: str | None = None
    since: datetime | None = None
    to: str | None = None
    dry_run: bool = False
    force: bool = False
    target_from: str | None = None
    target_to: str | None = None
    keep_secrets: bool = False


async def target_change(
    target_from: Annotated[Name, Query(alias="targetFrom")] = None,
    target_to: Annotated[Name, Query(alias="targetTo")] = None,
    *,
    keep_secrets: Annotated[bool, Query(alias="keepSecrets")] = False,
) -> TargetChange | None:
    """Return how targets change. Raises 422."""
    if target_from is None and target_to is None and not keep_secrets:
        return None
    if target_from is None or target_to is None:
        raise unprocessable("`targetFrom` and `targetTo` go together")
    change = TargetChange(target_from, target_to, keep_secrets)
    if problem := change.problem():
        raise unprocessable(problem)
    return change


Change = Annotated[TargetChange | None, Depends(target_change)]


async def letter_filter(
    queue: Name = None,
    pool: Name = None,
    reason: Annotated[Reason | None, BLANK_IS_NONE] = None,
    target: Name = None,
    since: Moment = None,
) -> LetterFilter:
    return LetterFilter(
        queue=queue, pool=pool, reason=reason, target=target, since=unix_time(since)
    )


Wanted = Annotated[LetterFilter, Depends(letter_filter)]


routes = APIRouter(prefix="/dead-letters", tags=["dead letters"])


@routes.get("")
async def list_letters(
    router: CurrentRouter,
    wanted: Wanted,
    limit: Annotated[int, Query(ge=1, le=MAX_PAGE_ITEMS)] = 100,
    cursor: Annotated[Cursor | None, BLANK_IS_NONE] = None,
) -> LetterPage:
    """List dead letters, newest first. `next` is the cursor of the page after this one."""
    found = await router.letters.find(wanted, limit=limit + 1, before=cursor)
    more = str(found[limit - 1].id) if len(found) > limit else None
    return LetterPage.model_validate({"items": found[:limit], "next": more})


@routes.get("/{letter_id}", response_model=LetterDetail)
async def show(router: CurrentRouter, letter_id: str) -> KeptLetter:
    """Show a dead letter and its message, without the token, the secret and the body."""
    kept = await router.letters.get(_number(letter_id))
    if kept is None:
        raise Unknown(NO_SUCH_LETTER)
    return kept


@routes.post("/replay", openapi_extra=body_schema(ReplayOrder, required=False))
async def replay_many(
    router: CurrentRouter,
    request: Request,
    wanted: Wanted,
    change: Change,
    *,
    to: Name = None,
    dry_run: Annotated[bool, Query(alias="dryRun")] = False,
    force: bool = False,
) -> ReplayedMany:
    """Publish all dead letters that match, oldest first, to their own queues or to `to`.

    When one fails, the later ones of its group stay dead letters. Targets that begin with
    `targetFrom` begin with `targetTo` then; `authToken` and `signingSecret` go along to another
    origin only with `keepSecrets`. All parameters may also be given in a JSON body.
    """
    order = await read_json(request, ReplayOrder, if_empty=ReplayOrder())
    dry_run = dry_run or order.dry_run
    narrowed = LetterFilter(
        queue=order.queue or wanted.queue,
        pool=order.pool or wanted.pool,
        reason=order.reason or wanted.reason,
        target=order.target or wanted.target,
        since=wanted.since if order.since is None else unix_time(order.since),
    )
    change = change or await target_change(
        order.target_from, order.target_to, keep_secrets=order.keep_secrets
    )
    report = await router.replays.replay_all(
        narrowed,
        to=order.to or to,
        force=force or order.force,
        dry_run=dry_run,
        change=change,
    )
    return ReplayedMany(
        replayed=report.replayed,
        skipped=sum(report.skipped.values()),
        reasons=report.skipped,
        dry_run=dry_run,
    )


@routes.post("/{letter_id}/replay")
async def replay(
    router: CurrentRouter, letter_id: str, change: Change, to: Name = None, force: bool = False
) -> Replayed:
    """Publish a dead letter to the queue it came from, or to the queue named `to`.

    A second replay needs `force`. If the queue no longer exists, `to` is needed.
    """
    await router.replays.replay(_number(letter_id), to=to, force=force, change=change)
    return Replayed(replayed=1)


@routes.delete("/{letter_id}")
async def discard(router: CurrentRouter, letter_id: str) -> Discarded:
    """Delete a dead letter permanently. A group that it held goes on."""
    if not await router.replays.discard(_number(letter_id)):
        raise Unknown(NO_SUCH_LETTER)
    return Discarded(discarded=1)


def _number(letter_id: str) -> int:
    """Raise Unknown unless it is a number that the store can have given."""
    if not (letter_id.isascii() and letter_id.isdigit() and len(letter_id) <= ID_DIGITS):
        raise Unknown(NO_SUCH_LETTER)
    return int(letter_id)
