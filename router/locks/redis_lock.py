"""A leader lock in Redis: a key that expires."""

from typing import Any, Final

from router.brokers.redis.connection import RedisConnection
from router.locks import LockRequest, instance_of, lock_errors
from router.ports import LockState

# KEYS: the lock, its fence. ARGV: owner, TTL in milliseconds.
# A server that has just started may have forgotten a lock in use: it grants none
# before the longest time for which such a lock can be good (whole seconds, rounded up).
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


class RedisLocks:
    def __init__(self, url: str, request: LockRequest) -> None:
        self._connection = RedisConnection(url, retries=1)
        self._request = request

    def lock(self, name: str) -> "RedisLock":
        return RedisLock(self._connection, self._request.of_queue(name))

    async def number(self, name: str) -> int:
        return int(await self._run("return redis.call('GET', KEYS[1])", name) or 0)

    async def keep_number(self, name: str, number: int) -> None:
        await self._run("return redis.call('SET', KEYS[1], ARGV[1])", name, number)

    async def _run(self, script: str, name: str, *arguments: int) -> Any:
        with lock_errors():
            keys = (self._request.number_key(name),)
            return await self._connection.run(script, keys, arguments)

    async def close(self) -> None:
        await self._connection.close()


class RedisLock:
    def __init__(self, connection: RedisConnection, request: LockRequest) -> None:
        self._connection = connection
        self._request = request
        self._ttl_ms = round(request.ttl * 1000)
        # The braces keep both on one node of a cluster.
        self._keys = (request.key, f"{{{request.key}}}:fence")

    async def acquire(self) -> LockState:
        owner, fence, left_ms = await self._run(_ACQUIRE, self._ttl_ms)
        return LockState(
            holder=instance_of(owner.decode()),
            is_ours=owner.decode() == self._request.owner,
            fence=int(fence or 0),
            age=max((self._ttl_ms - left_ms) / 1000, 0.0),
        )

    async def renew(self, fence: int) -> bool:
        return bool(await self._run(_RENEW, self._ttl_ms, fence))

    async def release(self) -> None:
        await self._run(_RELEASE)

    async def _run(self, script: str, *arguments: int) -> Any:
        with lock_errors():
            return await self._connection.run(script, self._keys, (self._request.owner, *arguments))
