"""Dead letters for tests."""

from msgspec.structs import replace

from router.core.dead_letter import DeadLetter, Reason

TOKEN = "tok-very-secret"
SECRET = "whsec_very-secret"
BODY = (
    b'{"id":"m1","mediationTarget":"https://svc/api","messageGroupId":"g","authToken":"'
    + TOKEN.encode()
    + b'","signingSecret":"'
    + SECRET.encode()
    + b'"}'
)

LETTER = DeadLetter(
    queue="orders",
    fingerprint="k1",
    message_id="m1",
    pool="POOL-A",
    target="https://svc/api",
    reason=Reason.CONFIG_ERROR,
    http_status=404,
    reply=b"not here",
    error="HTTP 404",
    failures=1,
    requests=3,
    first_seen=1_800_000_000.0,
    dead_at=1_800_000_001.5,
    body=BODY,
)

MALFORMED = replace(
    LETTER,
    fingerprint="bad",
    message_id=None,
    pool=None,
    target=None,
    reason=Reason.MALFORMED,
    http_status=None,
    reply=b"",
    error="the body is not UTF-8",
    failures=0,
    requests=0,
    body=b'\xff{"authToken":"' + TOKEN.encode() + b'"}',
)


def letter(number: int, *, queue: str = "orders") -> DeadLetter:
    """One of many: message `m<number>`."""
    body = b'{"id":"m%d","mediationTarget":"https://svc/api"}' % number
    return replace(
        LETTER, fingerprint=f"k{number}", message_id=f"m{number}", queue=queue, body=body
    )
