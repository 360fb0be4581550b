"""The Lua scripts for Redis: each is one transaction, in the log file too.

KEYS of all: the stream, the delayed messages by time, their content, and the tallies of returned
ones. ARGV[1] is the group, ARGV[2] our consumer.

A message is out while it is in the group's pending list. The fence of a lease is the consumer and
the number of deliveries, which a new hand-over changes.
"""

from typing import Final

from router.brokers.kit.retries import PREFIX

RETURNED: Final = "-"  # the consumer that owns what was given back without a delay
_RETURNED_IDLE_MS: Final = 864_000_000  # longer than any lease: it can be claimed at once
_MOVED_AT_ONCE: Final = 1000
_MAX_COPIED: Final = 7900  # names and values of one message: Lua unpacks no more than 7,999

_NOW: Final = """
local clock = redis.call('TIME')
local now = clock[1] * 1000 + math.floor(clock[2] / 1000)
"""
_HOLDS: Final = """
local function holds(id, count)
  local pending = redis.call('XPENDING', KEYS[1], ARGV[1], id, id, 1)[1]
  return pending and pending[2] == ARGV[2] and pending[4] == tonumber(count)
end
"""
_DELAY: Final = """
local function delay(due, fields)
  local token = string.format('%020d', redis.call('HINCRBY', KEYS[3], 'last', 1))
  redis.call('HSET', KEYS[3], token, cmsgpack.pack(fields))
  redis.call('ZADD', KEYS[2], due, token)
end
"""

# ARGV: lease in ms, limit, whether to look for leases that have ended, whether the queue is strict.
# Of a strict queue, what another consumer holds comes before anything newer, in the order of the
# stream: nothing is handed out before all of its leases have ended (ORD-3).
# Returns the messages as {id, count, tally, fields}, the last id of the stream, and the ms until a
# delayed message is due (-1: there is none).
CLAIM: Final = f"""
{_NOW}
local due = redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, {_MOVED_AT_ONCE})
for _, token in ipairs(due) do
  local packed = redis.call('HGET', KEYS[3], token)
  if packed then
    redis.call('XADD', KEYS[1], '*', unpack(cmsgpack.unpack(packed)))
  end
  redis.call('HDEL', KEYS[3], token)
  redis.call('ZREM', KEYS[2], token)
end
local limit, found = tonumber(ARGV[4]), {{}}
local function take(entry, count)
  local tally = count > 1 and redis.call('HGET', KEYS[4], entry[1])
  table.insert(found, {{entry[1], count, tally or '', entry[2]}})
end
local others, may_claim = 0, true
if ARGV[6] == '1' then
  for _, each in ipairs(redis.call('XPENDING', KEYS[1], ARGV[1])[4] or {{}}) do
    if each[1] ~= ARGV[2] and each[1] ~= '{RETURNED}' then
      local ended = redis.call(
        'XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[3], '-', '+', each[2], each[1])
      others = others + tonumber(each[2])
      may_claim = may_claim and #ended == tonumber(each[2])
    end
  end
end
local returned = redis.call('XPENDING', KEYS[1], ARGV[1], '-', '+', 1, '{RETURNED}')
if may_claim and (ARGV[5] == '1' or #returned > 0 or others > 0) then
  local cursor = '0-0'
  repeat
    local some = redis.call(
      'XAUTOCLAIM', KEYS[1], ARGV[1], ARGV[2], ARGV[3], cursor, 'COUNT', limit - #found)
    cursor = some[1]
    for _, entry in ipairs(some[2]) do
      if entry then
        local pending = redis.call('XPENDING', KEYS[1], ARGV[1], entry[1], entry[1], 1)
        take(entry, pending[1][4])
      end
    end
  until cursor == '0-0' or #found >= limit
end
if may_claim and #found < limit then
  local new = redis.call(
    'XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', limit - #found, 'STREAMS', KEYS[1], '>')
  if new then
    for _, entry in ipairs(new[1][2]) do
      take(entry, 1)
    end
  end
end
local last = '0-0'
local info = redis.call('XINFO', 'STREAM', KEYS[1])
for at = 1, #info, 2 do
  if info[at] == 'last-generated-id' then
    last = info[at + 1]
  end
end
local next_due = redis.call('ZRANGE', KEYS[2], 0, 0, 'WITHSCORES')[2]
return {{found, last, next_due and math.max(next_due - now, 0) or -1}}
"""

# ARGV: pairs of id and count. Returns the positions of those that we do not hold, from 0.
ACK: Final = f"""
{_HOLDS}
local lost = {{}}
for at = 3, #ARGV, 2 do
  if holds(ARGV[at], ARGV[at + 1]) then
    redis.call('XACK', KEYS[1], ARGV[1], ARGV[at])
    redis.call('XDEL', KEYS[1], ARGV[at])
    redis.call('HDEL', KEYS[4], ARGV[at])
  else
    table.insert(lost, (at - 3) / 2)
  end
end
return lost
"""

# ARGV: ms that they have been idle then; pairs of id and count. Returns as ACK does.
EXTEND: Final = f"""
{_HOLDS}
local lost = {{}}
for at = 4, #ARGV, 2 do
  if holds(ARGV[at], ARGV[at + 1]) then
    redis.call(
      'XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, ARGV[at], 'IDLE', ARGV[3], 'JUSTID')
  else
    table.insert(lost, (at - 4) / 2)
  end
end
return lost
"""

# ARGV: from which id, and how many at most. Returns the messages that our consumer has, as
# {id, consumer, ms, count}.
PENDING: Final = "return redis.call('XPENDING', KEYS[1], ARGV[1], ARGV[3], '+', ARGV[4], ARGV[2])"

# ARGV: pairs of id and count. Gives back what we hold, in its place, to be claimed at once.
RELEASE: Final = f"""
{_HOLDS}
for at = 3, #ARGV, 2 do
  if holds(ARGV[at], ARGV[at + 1]) then
    redis.call(
      'XCLAIM', KEYS[1], ARGV[1], '{RETURNED}', 0, ARGV[at],
      'IDLE', {_RETURNED_IDLE_MS}, 'JUSTID')
  end
end
"""

# ARGV: the field of the message, and whether all others are kept, too; then for each: id, count,
# delay in ms, tally, and the number of fields that the copy gets besides the message's own,
# followed by them. Returns as ACK does.
# Without a delay, a message stays where it is in the stream. With one, a copy of it waits, and is
# stored in the same transaction in which the original is removed.
NACK: Final = f"""
{_NOW}
{_HOLDS}
{_DELAY}
local kept = {{traceparent = true, tracestate = true}}
local keeps_all = ARGV[4] == '1'
local lost, number, at = {{}}, 0, 5
while at <= #ARGV do
  local id, count, wait, tally = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2]), ARGV[at + 3]
  local more = tonumber(ARGV[at + 4])
  if not holds(id, count) then
    table.insert(lost, number)
  elseif wait == 0 then
    redis.call('HSET', KEYS[4], id, tally)
    redis.call(
      'XCLAIM', KEYS[1], ARGV[1], '{RETURNED}', 0, id, 'IDLE', {_RETURNED_IDLE_MS}, 'JUSTID')
  else
    local entry, fields = redis.call('XRANGE', KEYS[1], id, id)[1], {{}}
    if entry then
      local body
      for field = 1, #entry[2], 2 do
        local name = entry[2][field]
        local is_foreign = keeps_all and string.sub(name, 1, {len(PREFIX)}) ~= '{PREFIX}'
        if name == ARGV[3] then
          body = entry[2][field + 1]
        elseif kept[name] and #fields < 100 or is_foreign and #fields < {_MAX_COPIED} then
          table.insert(fields, entry[2][field])
          table.insert(fields, entry[2][field + 1])
        end
      end
      if body then
        table.insert(fields, ARGV[3])
        table.insert(fields, body)
      end
      for field = at + 5, at + 4 + more do
        table.insert(fields, ARGV[field])
      end
      delay(now + wait, fields)
    end
    redis.call('XACK', KEYS[1], ARGV[1], id)
    redis.call('XDEL', KEYS[1], id)
    redis.call('HDEL', KEYS[4], id)
  end
  at, number = at + 5 + more, number + 1
end
return lost
"""

# ARGV: the field; then for each the ms until it is due, and the body.
PUBLISH: Final = f"""
{_NOW}
{_DELAY}
for at = 4, #ARGV, 2 do
  local wait = tonumber(ARGV[at])
  if wait > 0 then
    delay(now + wait, {{ARGV[3], ARGV[at + 1]}})
  else
    redis.call('XADD', KEYS[1], '*', ARGV[3], ARGV[at + 1])
  end
end
"""

# Returns how many are in the stream, out, given back, and delayed.
DEPTH: Final = f"""
local pending, returned = redis.call('XPENDING', KEYS[1], ARGV[1]), 0
for _, each in ipairs(pending[4] or {{}}) do
  if each[1] == '{RETURNED}' then
    returned = tonumber(each[2])
  end
end
return {{
  redis.call('XLEN', KEYS[1]), pending[1], returned, redis.call('ZCARD', KEYS[2])}}
"""

# ARGV: ms. Forgets consumers that hold nothing: our own, and those idle for longer.
# One that holds something must stay: its messages would be lost with it.
TIDY: Final = """
for _, each in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local facts = {}
  for at = 1, #each, 2 do
    facts[each[at]] = each[at + 1]
  end
  if facts.pending == 0 and (facts.name == ARGV[2] or facts.idle > tonumber(ARGV[3])) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], facts.name)
  end
end
"""
