"""A leader lock in Redis: a key that expires. The only place where its client is imported."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from router.locks.claim import Claim, instance_of
from router.ports import LockUnavailable, Tenure

CALL_SECONDS: Final = 5.0

# KEYS: the lock, its fence. ARGV: owner, TTL in milliseconds.
# A server that has just started may have forgotten a lock that somebody still relies on: nobody is
# given it before the longest time for which such a lock can be good (whole seconds, rounded up).
_ACQUIRE: Final = """
local holder = redis.call('GET', KEYS[1])
if holder == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
elseif holder then
  return {holder, redis.call('GET', KEYS[2]), redis.call('PTTL', KEYS[1])}
else
  local uptime = string.match(redis.call('INFO', 'server'), 'uptime_in_seconds:(%d+)')
  if (tonumber(uptime) - 1) * 1000 < tonumber(ARGV[2]) then
    return {'', '0', 0}
  end
  redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
  redis.call('INCR', KEYS[2])
end
return {ARGV[1], redis.call('GET', KEYS[2]), tonumber(ARGV[2])}
"""
# ARGV: owner, TTL in milliseconds, fence.
_RENEW: Final = """
if redis.call('GET', KEYS[1]) ~= ARGV[1] or redis.call('GET', KEYS[2]) ~= ARGV[3] then
  return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
# ARGV: owner.
_RELEASE: Final = """
if redis.call('GET', KEYS[1]) == ARGV[1] then
  redis.call('DEL', KEYS[1])
end
"""


@asynccontextmanager
async def open_redis_lock(url: str, claim: Claim) -> AsyncIterator["RedisLock"]:
    client = Redis.from_url(
        url,
        decode_responses=True,
        socket_timeout=CALL_SECONDS,
        socket_connect_timeout=CALL_SECONDS,
        retry=Retry(NoBackoff(), 1),  # on a new connection: the old one may have died while idle
        client_name="message-router",
    )
    try:
        yield RedisLock(client, claim)
    finally:
        await client.aclose()


class RedisLock:
    def __init__(self, client: Redis, claim: Claim) -> None:
        self._client = client
        self._claim = claim
        # The braces keep both on one node of a cluster.
        self._keys = (claim.key, f"{{{claim.key}}}:fence")

    async def acquire(self) -> Tenure:
        claim = self._claim
        owner, fence, left_ms = await self._run(_ACQUIRE, claim.owner, claim.ttl_ms)
        return Tenure(
            holder=instance_of(owner) if owner else None,
            is_ours=owner == claim.owner,
            fence=int(fence or 0),
            age=max(claim.ttl - left_ms / 1000, 0.0),
        )

    async def renew(self, fence: int) -> bool:
        claim = self._claim
        return bool(await self._run(_RENEW, claim.owner, claim.ttl_ms, fence))

    async def release(self) -> None:
        await self._run(_RELEASE, self._claim.owner)

    async def _run(self, script: str, *arguments: str | int) -> Any:
        with _our_errors():
            return await self._client.eval(
                script, len(self._keys), *self._keys, *map(str, arguments)
            )


@contextmanager
def _our_errors() -> Iterator[None]:
    """Without the client's texts, which may name hosts and users; what the server says is kept."""
    try:
        yield
    except ResponseError as error:
        raise LockUnavailable(f"Redis says: {error}") from None
    except (RedisError, OSError) as error:
        raise LockUnavailable(f"no answer from Redis: {type(error).__name__}") from None
