-- Renews leases of requests in flight, also those that a restart of this server has lost.
-- KEYS: one set. ARGV: a lease's milliseconds, then the ids.
local time = redis.call('TIME')
local ends = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000) + tonumber(ARGV[1])
for i = 2, #ARGV do
  redis.call('ZADD', KEYS[1], ends, ARGV[i])
end
redis.call('PEXPIRE', KEYS[1], 2 * tonumber(ARGV[1]))
return {#ARGV - 1}
