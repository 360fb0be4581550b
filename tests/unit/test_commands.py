"""Chains, replies, content keys and times, as far as they need no clock (CMD-2 to CMD-11)."""

import json
import timeit
from contextlib import suppress
from typing import Any

import msgspec
import pytest

from router.core.commands import (
    content_key,
    dated_body,
    failure_of,
    next_steps,
    not_before_of,
    reply_body,
)
from router.core.dead_letter import Reason
from router.core.history import Try
from router.core.message import (
    MAX_CHAIN_STEPS,
    MAX_MESSAGE_BYTES,
    MAX_STEPS,
    YEAR_SECONDS,
    Malformed,
    Message,
    parse,
    steps_of,
)
from router.core.outcome import (
    MAX_ERROR_BYTES,
    MAX_REPLY_BYTES,
    Ending,
    Failure,
    Outcome,
    Reply,
    judge,
)
from router.core.returning import GiveUp
from tests.support.jobs import make_job
from tests.support.pace import slowdown

TARGET = "http://target.test/"


def body(**fields: Any) -> bytes:
    return json.dumps({"id": "a", "mediationTarget": TARGET, **fields}).encode()


def chain(steps: int) -> dict[str, Any]:
    step: dict[str, Any] = {"mediationTarget": TARGET}
    for _ in range(steps - 1):
        step = {"mediationTarget": TARGET, "then": step}
    return step


def judged(status: int, said: bytes, *, too_long: bool = False) -> Outcome:
    return judge(Reply(status, said, too_long=too_long), lambda: 0.0)


@pytest.mark.rule("CMD-2")
class TestResults:
    @pytest.mark.parametrize(
        "result", [b'{"a" : 1.50}', b"0", b"false", b'"text"', b"[]", '"grün"'.encode()]
    )
    def test_the_result_of_a_reply_is_kept_as_it_is_written(self, result: bytes) -> None:
        outcome = judged(201, b'{"x": false, "result": %b }' % result)

        assert outcome.ending == Ending(result=result)
        assert outcome.status == 201

    @pytest.mark.parametrize(
        "said",
        [
            b"",
            b"{}",
            b'{"result": null}',
            b'{"other": "\\"result\\""}',
            b'["result"]',
            b'{"result": 1',
            b'{"result": "\xff"}',
            b'{"x": {"result": 1}}',
        ],
    )
    def test_without_one_there_is_none(self, said: bytes) -> None:
        assert judged(200, said) is judged(200, b"")

    def test_one_of_64_kib_is_kept_and_a_longer_one_is_marked(self) -> None:
        fits, exceeds = b'"' + b"x" * (64 * 1024 - 2) + b'"', b'"' + b"x" * (64 * 1024 - 1) + b'"'

        assert judged(200, b'{"result":%b}' % fits).ending == Ending(result=fits)
        omitted = Ending(result_omitted=True)
        assert judged(200, b'{"result":%b}' % exceeds).ending == omitted
        assert judged(200, b'{"result":"xxx', too_long=True).ending == omitted
        deep = b"[" * 65 + b"]" * 65
        assert judged(200, b'{"result":%b}' % deep).ending == omitted

    def test_a_long_reply_without_a_result_says_nothing(self) -> None:
        assert judged(200, b'{"ack": false, "x":"', too_long=True).ending is None

    def test_a_message_that_is_to_be_tried_again_has_no_result(self) -> None:
        assert judged(200, b'{"ack": false, "result": 1}').ending is None


@pytest.mark.rule("CMD-3")
class TestFailures:
    @pytest.mark.parametrize(
        ("status", "said", "code", "text"),
        [
            (409, b'{"error": {"code": "E1", "message": "no"}}', "E1", "no"),
            (409, b'{"error": {"code": 17}}', "17", "HTTP 409"),
            (409, b'{"error": {"message": "no"}}', "HTTP_409", "no"),
            (409, b'{"error": {"code": " ", "message": " "}}', "HTTP_409", "HTTP 409"),
            (409, b'{"error": "no"}', "HTTP_409", "HTTP 409"),
            (409, b'{"error": {"code": []}}', "HTTP_409", "HTTP 409"),
            (409, b'{"error": ', "HTTP_409", "HTTP 409"),
            (409, b"", "HTTP_409", "HTTP 409"),
            (404, b'{"error": {"code": "%b"}}' % (b"x" * 999), "x" * 128, "HTTP 404"),
        ],
    )
    def test_code_and_text_are_the_targets_own_or_ours(
        self, status: int, said: bytes, code: str, text: str
    ) -> None:
        outcome = judged(status, said)
        given = None if outcome.ending is None else outcome.ending.failure
        why = GiveUp(Reason.CONFIG_ERROR, outcome.detail, outcome.status, b"", given)

        assert failure_of(make_job().message, (), why) == Failure(code, text, status)

    def test_without_a_status_the_error_has_our_name(self) -> None:
        def failure(*tries: Try) -> Failure:
            return failure_of(make_job().message, tries, GiveUp(Reason.RETRIES_EXHAUSTED, ""))

        assert failure() == Failure("RETRIES_EXHAUSTED", "RETRIES_EXHAUSTED")
        assert failure(Try(0.0, 1.0, None, "Timeout")).code == "Timeout"
        unavailable = Try(0.0, 1.0, 503, "HttpError")
        assert failure(unavailable) == Failure("HTTP_503", "RETRIES_EXHAUSTED", 503)
        assert failure(unavailable, Try(2.0, 1.0, 200, "Permanent")).code == "Permanent"

    def test_the_text_is_masked_and_short(self) -> None:
        said = Failure("E", f"token-of-a {TARGET}?key=1 " + "ü" * 2000)
        failure = failure_of(make_job().message, (), GiveUp(Reason.PERMANENT, "", 400, b"", said))

        assert failure.message.startswith(f"*** {TARGET}?*** ü")
        assert 1000 < len(failure.message.encode()) <= 1024

    @pytest.mark.rule("OPS-5")
    @pytest.mark.parametrize("way", ["tok/en-123", "tok\\/en-123", "\\u0074ok\\u002fen-12\\u0033"])
    @pytest.mark.parametrize("cut", range(1, 23))
    def test_a_token_at_the_end_of_what_is_read_is_masked(self, way: str, cut: int) -> None:
        said = "?" + "q" * (16 * MAX_ERROR_BYTES - 2 - cut) + " " + way + " and more"
        shown = failure_of(with_token("tok/en-123"), (), refused(said)).message

        start = shown.removeprefix("?*** ").partition(" ")[0]
        assert start == "***" or (len(start) < 18 and "e" not in start)  # three letters may stay

    @pytest.mark.rule("OPS-5")
    def test_a_password_at_the_end_of_what_is_read_is_masked(self) -> None:
        before = "?" + "q" * (16 * MAX_ERROR_BYTES - 40) + " see "
        failure = failure_of(
            make_job().message, (), refused(f"{before}amqp://bob:{'pw' * 20}@host/")
        )

        assert failure.message == "?*** see amqp://***"

    @pytest.mark.timing
    @pytest.mark.rule("P5")
    @pytest.mark.parametrize("token", ["a", "aaaa", "a" * 16_000, "a" * 8000 + "b" + "a" * 8000])
    @pytest.mark.parametrize("unit", ["a", "\\u0061", "?a ", "://@", "\\", "ab"])
    def test_no_text_of_1_mib_takes_100_milliseconds(self, token: str, unit: str) -> None:
        message, why = with_token(token), refused(unit * (MAX_REPLY_BYTES // len(unit)))
        quickest = min(timeit.repeat(lambda: failure_of(message, (), why), number=1, repeat=3))

        assert quickest < 0.1 * slowdown()


def with_token(token: str) -> Message:
    return parse(body(authToken=token))


def refused(said: str) -> GiveUp:
    return GiveUp(Reason.PERMANENT, "", 400, b"", Failure("E", said))


@pytest.mark.rule("CMD-1")
def test_a_blank_correlation_id_is_none() -> None:
    assert parse(body(correlationId=" ")).correlation_id is None


@pytest.mark.rule("CMD-3")
def test_a_reply_says_how_a_message_ended() -> None:
    message = parse(body(correlationId="c"))
    failed = Ending(Failure("E", "why", 400))

    assert reply_body(message, Ending(result=b"1.50")) == (
        b'{"messageId":"a","correlationId":"c","outcome":"SUCCESS","result":1.50}'
    )
    assert reply_body(message, failed) == (
        b'{"messageId":"a","correlationId":"c","outcome":"FAILED",'
        b'"errorCode":"E","errorMessage":"why"}'
    )


@pytest.mark.rule("CMD-11")
class TestChainSteps:
    def test_steps_are_named_by_their_places(self) -> None:
        one, two = chain(1), {**chain(2), "id": "own"}

        assert [place for place, _ in steps_of(parse(body(then=[one, two])))] == [
            "then[0]",
            "then[1]",
            "then[1].then",
        ]
        assert [place for place, _ in steps_of(parse(body(then=one)))] == ["then"]
        nothings: tuple[object, ...] = (None, [])
        for nothing in nothings:
            assert list(steps_of(parse(body(then=nothing)))) == []

    def test_there_are_at_most_16_steps_in_a_list_and_16_deep(self) -> None:
        parse(body(then=[chain(1)] * MAX_STEPS))
        parse(body(then=chain(MAX_STEPS)))
        with pytest.raises(Malformed, match="more than 16 steps"):
            parse(body(then=[chain(1)] * (MAX_STEPS + 1)))
        with pytest.raises(Malformed, match=r"`then\.then.*` is more than 16 deep"):
            parse(body(then=chain(MAX_STEPS + 1)))
        with pytest.raises(Malformed, match=r"`then\.then` has more than 16 steps"):
            parse(body(then={**chain(1), "then": [chain(1)] * (MAX_STEPS + 1)}))

    def test_there_are_at_most_1000_steps_altogether(self) -> None:
        ten = {**chain(1), "then": [chain(1)] * 9}
        hundred = {**chain(1), "then": [ten] * 9 + [{**chain(1), "then": [chain(1)] * 8}]}
        thousand = [hundred] * 10
        parse(body(then=thousand))
        with pytest.raises(Malformed, match=f"`then` has more than {MAX_CHAIN_STEPS} steps"):
            parse(body(then=[*thousand, chain(1)]))

    @pytest.mark.parametrize(
        ("then", "text"),
        [
            (7, r"`then`: Expected `object \| array \| null`, got `int`$"),
            ([chain(1), 7], r"`then\[1\]`: Expected `object`, got `int`$"),
            ({**chain(1), "then": ""}, r"`then\.then`: Expected `object \| array \| null`"),
            (
                [chain(1), {**chain(1), "then": [{}]}],
                r"`then\[1\]\.then\[0\]`: .*mediationTarget",
            ),
            ({**chain(1), "priority": 10}, r"`then`: .* - at `\$\.priority`$"),
            ({**chain(1), "id": ""}, r"`then`: .* - at `\$\.id`$"),
            ([{**chain(1), "then": {**chain(1), "mediationTarget": "x"}}], "`then.*`: `mediation"),
        ],
    )
    def test_a_step_that_is_malformed_makes_the_message_so(self, then: object, text: str) -> None:
        with pytest.raises(Malformed, match=text):
            parse(body(then=then))

    def test_a_step_has_room_for_the_id_that_it_will_get(self) -> None:
        for size in range(MAX_MESSAGE_BYTES - 200, MAX_MESSAGE_BYTES):
            given = b'{"mediationTarget":"http://t","payload":"' + b"x" * size + b'"}'
            whole = b'{"id":"a","mediationTarget":"http://t","then":' + given + b"}"
            fitting: list[Message] = []
            with suppress(Malformed):  # larger than allowed
                fitting = [parse(whole)]
            for message in fitting:
                (step,) = next_steps(message, "0" * 32, None)
                assert len(step.message.id) == 39

    def test_a_result_that_would_nest_too_deep_is_not_passed(self) -> None:
        message = parse(body(then={**chain(1), "passResult": True}))

        (deep,) = next_steps(message, "f", b"[" * 63 + b"]" * 63)
        (flat,) = next_steps(message, "f", b"[]")

        assert deep.lacks_result
        assert not deep.message.has_payload
        assert bytes(flat.message.payload) == b'{"previous":[]}'


@pytest.mark.rule("CMD-6")
class TestContentKeys:
    def same(self, one: bytes, two: bytes) -> bool:
        message = b'{"id":"%b","mediationTarget":"http://t/","dedup":"content","payload":%b}'
        return content_key(parse(message % (b"a", one))) == content_key(
            parse(message % (b"b", two))
        )

    @pytest.mark.parametrize(
        ("one", "two"),
        [
            (b'{"a":1,"b":[{"d":2,"c":3}]}', b'{ "b" : [ {"c":3,"d":2} ], "a":1}'),
            ('"ü"'.encode(), b'"\\u00fc"'),
            (b"1e400", b" 1e400"),
        ],
    )
    def test_order_of_keys_and_blanks_do_not_count(self, one: bytes, two: bytes) -> None:
        assert self.same(one, two)

    def test_many_lists_are_read_as_few_are(self, monkeypatch: pytest.MonkeyPatch) -> None:
        written = b'[{"b":[1.0,2,{"x":null}],"a":"\\u00e9\\n","a":true},[],{},-1E400]'
        message = parse(body(payload=json.loads(written.replace(b"-1E400", b"1"))))
        message.payload = msgspec.Raw(written)
        quick = content_key(message)
        monkeypatch.setattr("router.core.commands.MAX_CONTAINERS_IN_C", 0)

        assert content_key(message) == quick

    @pytest.mark.parametrize(
        ("one", "two"),
        [
            (b"1", b"1.0"),
            (b"1", b'"1"'),
            (b"{}", b"[]"),
            (b"{}", b"null"),
            (b'{"a":1}', b'[["a",1]]'),
            (b"[1,2]", b"[2,1]"),
            (b"true", b"1"),
        ],
    )
    def test_everything_else_does(self, one: bytes, two: bytes) -> None:
        assert not self.same(one, two)

    @pytest.mark.parametrize(
        "other",
        [
            {"mediationTarget": "http://u/"},
            {"poolCode": "P"},
            {"messageGroupId": "P"},
            {"replyTo": "P"},
        ],
    )
    def test_target_pool_group_and_reply_queue_count(self, other: dict[str, str]) -> None:
        assert content_key(parse(body())) != content_key(parse(body(**other)))
        assert content_key(parse(body())) == content_key(parse(body(correlationId="c")))


@pytest.mark.rule("CMD-5")
class TestTimes:
    def test_the_later_of_both_counts(self) -> None:
        at = "1970-01-01T01:00:00+01:00"

        assert not_before_of(parse(body()), 5.0) is None
        assert not_before_of(parse(body(notBefore=at)), 5.0) == 0.0
        assert not_before_of(parse(body(delaySeconds=1.5)), 5.0) == 6.5
        assert not_before_of(parse(body(notBefore=at, delaySeconds=1)), 5.0) == 6.0

    @pytest.mark.parametrize("bad", ["tomorrow", "2026-01-01T00:00:00", 7, "", "2026-01-01"])
    def test_a_time_has_a_zone(self, bad: object) -> None:
        with pytest.raises(Malformed, match="notBefore"):
            parse(body(notBefore=bad))

    def test_a_delay_is_not_negative(self) -> None:
        with pytest.raises(Malformed, match="delaySeconds"):
            parse(body(delaySeconds=-1))
        with pytest.raises(Malformed, match="delaySeconds"):
            parse(body(delaySeconds=YEAR_SECONDS + 1))
        assert parse(body(delaySeconds=YEAR_SECONDS)).delay_seconds == YEAR_SECONDS

    def test_a_body_says_when_it_is_due_unless_it_does_already(self) -> None:
        delayed = body(delaySeconds=5, n=1.50)
        dated = dated_body(parse(delayed), delayed, 1_700_000_000.25)

        assert json.loads(dated)["notBefore"] == "2023-11-14T22:13:20.250000+00:00"
        assert "delaySeconds" not in json.loads(dated)
        assert not_before_of(parse(dated), 0.0) == 1_700_000_000.25
        for plain in (body(), body(notBefore="2026-01-01T00:00:00Z")):
            assert dated_body(parse(plain), plain, 1.0) == plain
        assert dated_body(parse(delayed), delayed, None) == delayed
        far = body(delaySeconds=5, notBefore="9999-12-31T23:59:59-23:59")
        assert dated_body(parse(far), far, 1_700_000_000.25) == far


def test_a_message_made_by_hand_has_no_steps() -> None:
    assert list(steps_of(Message(id="a", target=TARGET))) == []
