-- Shows one line as it stands; changes nothing.
--
-- KEYS: K, one that is never there, and T, as in line.lua.
-- ARGV: how many waiters to show at most; how inboxes are named on a cluster, as in line.lua.
-- Reply: server time in µs, value of K or false, its time to live in ms,
--        holders together {owner, end of lease µs, record, …}, waiters {owner, record, …}.
local call = redis.call
local time = call('TIME')
local now = string.format('%.0f', time[1] * 1000000 + time[2])
local K, tag = KEYS[1], string.sub(KEYS[3], 12)
local Q, W, D = 'fencelock:q:' .. tag .. K, 'fencelock:w:' .. tag .. K, 'fencelock:d:' .. tag .. K
local cur = call('GET', K)
local holders, waiters = {}, {}
if cur and (cur == 'fencelock:shared' or string.match(cur, '^fencelock:permit:')) then
  local ends = call('ZRANGEBYSCORE', D, now, '+inf', 'WITHSCORES')
  for index = 1, #ends, 2 do
    holders[#holders + 1] = ends[index]
    holders[#holders + 1] = ends[index + 1]
    holders[#holders + 1] = call('HGET', W, ends[index]) or ''
  end
  -- The leases of all of them are over; the next one to come will find out.
  if #ends == 0 and call('EXISTS', D) == 1 then cur = false end
end
-- A waiter whose client does not listen is dead, or on its way back to its place.
local listens = {}
local how, suffix = string.match(ARGV[2], '^(%a)(.*)$')
local count = how == 's' and 'SHARDNUMSUB' or 'NUMSUB'
local seen = {}
if tonumber(ARGV[1]) > 0 then seen = call('ZRANGE', Q, 0, tonumber(ARGV[1]) - 1) end
for _, owner in ipairs(seen) do
  local record = call('HGET', W, owner) or ''
  local session = string.match(record, '^w\n%a\n%d+\n%d+\n%d+\n(%x+)\n')
  if session then
    if not listens[session] then listens[session] = call('PUBSUB', count, 'fencelock:inbox:' .. session .. (suffix or ''))[2] end
    if listens[session] > 0 then
      waiters[#waiters + 1] = owner
      waiters[#waiters + 1] = record
    end
  end
end
return {now, cur, call('PTTL', K), holders, waiters}
