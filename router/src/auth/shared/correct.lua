-- Returns unused tokens to buckets, or charges used ones beyond the level.
-- KEYS: the buckets. ARGV: 'give' or 'charge', amount, time of the take, then the capacity of each bucket.
-- What time has refilled since the take is not returned. A charge is capped at a day beyond a full minute.
local WINDOW, MOST = 60000000, 60000000 + 86400000000
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local amount = tonumber(ARGV[2])
for i = 1, #KEYS do
  local full = tonumber(redis.call('GET', KEYS[i]) or now)
  if not full or full ~= full then
    full = now
  end
  full = math.min(math.max(full, now), now + MOST)
  local refill = math.ceil(amount * WINDOW / tonumber(ARGV[3 + i]))
  if ARGV[1] == 'give' then
    full = full - math.max(refill - math.max(now - tonumber(ARGV[3]), 0), 0)
  else
    full = math.min(full + refill, now + MOST)
  end
  if full <= now then
    redis.call('DEL', KEYS[i])
  else
    redis.call('SET', KEYS[i], string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1000)
  end
end
return {#KEYS}
