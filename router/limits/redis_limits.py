"""Shared limits in Redis: a hash for each rate, a sorted set of routers, and the server's clock."""

from typing import Any, Final

from router.brokers.redis.connection import RedisConnection
from router.core.sharing import RateTerms
from router.limits import SEEN_SECONDS, LimitsScope, limits_errors
from router.ports import Reserved

_NOW: Final = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
"""
# KEYS: the rate. ARGV: seconds between two slots, burst, portion, wanted.
# It is forgotten a minute after a pause has filled its burst again.
_RESERVE: Final = f"""{_NOW}
local step, burst = tonumber(ARGV[1]), tonumber(ARGV[2])
local before = redis.call('HMGET', KEYS[1], 'next', 'step')
local first, step_before = tonumber(before[1] or '0'), tonumber(before[2] or ARGV[1])
if step_before ~= step and first > now then
  first = now + (first - now) * step / step_before
end
first = math.max(first, now - (burst - 1) * step)
local begun = math.floor((now - first) / step) + 1
local count = math.max(tonumber(ARGV[3]), math.min(tonumber(ARGV[4]), begun))
local following = first + count * step
redis.call('HSET', KEYS[1], 'next', string.format('%.17g', following), 'step', ARGV[1])
redis.call('EXPIRE', KEYS[1], math.ceil(math.max(following - now, 0) + burst * step + 60))
return {{count, string.format('%.17g', first - now)}}
"""
# KEYS: the routers. ARGV: this one, for how many seconds one counts that was seen.
_SEEN: Final = f"""{_NOW}
redis.call('ZADD', KEYS[1], string.format('%.17g', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('%.17g', now - tonumber(ARGV[2])))
redis.call('EXPIRE', KEYS[1], 3600)
return redis.call('ZCARD', KEYS[1])
"""


class RedisLimits:
    def __init__(self, url: str, scope: LimitsScope) -> None:
        self._connection = RedisConnection(url, retries=1)
        self._scope = scope

    async def close(self) -> None:
        await self._connection.close()

    async def reserve(self, name: str, terms: RateTerms, wanted: int) -> Reserved:
        rate = (repr(terms.interval), terms.burst, terms.portion, wanted)
        count, delay = await self._run(_RESERVE, f"rate:{name}", *rate)
        return Reserved(int(count), float(delay))

    async def count_routers(self) -> int:
        return int(await self._run(_SEEN, "routers", self._scope.process, repr(SEEN_SECONDS)))

    async def _run(self, script: str, key: str, *arguments: str | int) -> Any:
        with limits_errors():
            return await self._connection.run(script, (f"{self._scope.key}:{key}",), arguments)
