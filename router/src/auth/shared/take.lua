-- Takes from every bucket and every set of leases, or from none.
-- KEYS: the buckets, then the sets.
-- ARGV: amount, number of buckets, a lease's id, its milliseconds, then the capacity of each key.
-- Reply: {0, now, time until full of each bucket}, {n, wait} if bucket n refuses, {-n, 0} if the set KEYS[n] does.
-- A bucket is the time at which it is full again, in microseconds of this server's clock.
local WINDOW, MOST = 60000000, 60000000 + 86400000000
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local now_ms = math.floor(now / 1000)
local amount, buckets, lease_ms = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[4])
local full = {}
for i = 1, buckets do
  local stored = tonumber(redis.call('GET', KEYS[i]) or now)
  -- Text that is no number, or not a number.
  if not stored or stored ~= stored then
    stored = now
  end
  full[i] = math.min(math.max(stored, now), now + MOST) + math.ceil(amount * WINDOW / tonumber(ARGV[4 + i]))
  if full[i] - now > WINDOW then
    return {i, full[i] - now - WINDOW}
  end
end
for i = buckets + 1, #KEYS do
  redis.call('ZREMRANGEBYSCORE', KEYS[i], '-inf', now_ms)
  if redis.call('ZCARD', KEYS[i]) >= tonumber(ARGV[4 + i]) then
    return {-i, 0}
  end
end
local reply = {0, now}
for i = 1, buckets do
  redis.call('SET', KEYS[i], string.format('%.0f', full[i]), 'PX', math.ceil((full[i] - now) / 1000) + 1000)
  reply[2 + i] = full[i] - now
end
for i = buckets + 1, #KEYS do
  redis.call('ZADD', KEYS[i], now_ms + lease_ms, ARGV[3])
  redis.call('PEXPIRE', KEYS[i], 2 * lease_ms)
end
return reply
