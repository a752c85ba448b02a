"""What runs inside Redis, as one step each: the same arithmetic as server.tenants.limits, on levels that gateways share.

For each tenant there are two keys, in one slot of a cluster. `levels` is a hash: what is left of each bucket, and when it was
so. `leases` is a sorted set of the running requests by the time at which they are given up for lost; a gateway renews its
own. Both expire when they say no more than their absence does.

Every script begins with the arguments: now ("" for Redis's own clock, which all gateways share), then requests, input and
output per minute and concurrency, -1 for unlimited. Numbers are written with 17 digits, since Redis cuts a number to a whole
one.
"""

from server.tenants.redis_batch import Script

_LEVELS = """
local EPSILON = 1e-6
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local caps = {tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])}
local concurrency = tonumber(ARGV[5])
local stored = redis.call('HMGET', KEYS[1], 'requests', 'input', 'output', 'at')
local passed = math.max(0, now - (tonumber(stored[4]) or now))
local levels = {}
for i = 1, 3 do
  levels[i] = math.min(caps[i], (tonumber(stored[i]) or caps[i]) + passed * caps[i] / 60)
end

local function wait(i, need)
  if caps[i] < 0 or levels[i] >= need - EPSILON then return 0 end
  return math.ceil((need - levels[i]) * 60000 / caps[i])
end

local function store()
  local full = 0
  local fields = {'at', string.format('%.17g', now)}
  local names = {'requests', 'input', 'output'}
  for i = 1, 3 do
    if caps[i] > 0 then
      fields[#fields + 1] = names[i]
      fields[#fields + 1] = string.format('%.17g', levels[i])
      full = math.max(full, (caps[i] - levels[i]) * 60000 / caps[i])
    else
      redis.call('HDEL', KEYS[1], names[i])
    end
  end
  redis.call('HSET', KEYS[1], unpack(fields))
  redis.call('PEXPIRE', KEYS[1], math.ceil(full) + 1000)
end
"""

# further arguments: input tokens, the lease's name, seconds that it lasts
# returns milliseconds until requests, input and output let it pass, and 1 if too many run; four zeros: it is granted
ACQUIRE = Script(
    _LEVELS
    + """
local input, lease, lasts = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local crowded = 0
if concurrency >= 0 then
  redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', string.format('%.17g', now))
  if redis.call('ZCARD', KEYS[2]) >= concurrency then crowded = 1 end
end
local waits = {wait(1, 1), wait(2, input), wait(3, 1), crowded}
if waits[1] + waits[2] + waits[3] + waits[4] > 0 then return waits end
levels[1], levels[2] = levels[1] - 1, levels[2] - input
store()
if concurrency >= 0 then
  redis.call('ZADD', KEYS[2], string.format('%.17g', now + lasts), lease)
  redis.call('PEXPIRE', KEYS[2], math.ceil(lasts * 1000))
end
return waits
"""
)

# further arguments: input tokens to give back (or, below zero, to charge), output tokens to charge, the lease's name
SETTLE = Script(
    _LEVELS
    + """
levels[2] = math.min(caps[2], levels[2] + tonumber(ARGV[6]))
levels[3] = levels[3] - tonumber(ARGV[7])
store()
redis.call('ZREM', KEYS[2], ARGV[8])
return 0
"""
)

# one key: leases; arguments: now, seconds that a lease lasts, then the leases' names. One that was given up is not revived
RENEW = Script("""
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = tonumber(time[1]) + tonumber(time[2]) / 1000000
end
local lasts = tonumber(ARGV[2])
for i = 3, #ARGV do
  redis.call('ZADD', KEYS[1], 'XX', string.format('%.17g', now + lasts), ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], math.ceil(lasts * 1000))
return 0
""")
