-- Finds out whether this server process took over from another one, which may have granted leases that it knows nothing of.
--
-- KEYS: N  the process that grants, and the longest lease it may have granted: run id '-' replication id ':' ms
--       G  quarantine: while it exists, nothing is granted to new owners; why, ':' and since when, in ms
--       T  the newest token, as in line.lua; not on a cluster
-- ARGV: run id of this process; its replication id; 1 if it was promoted from a replica; the longest lease of this client in ms;
--       life of N in ms; for how long the process is to wait for being young, in ms; the same if it knows of no predecessor;
--       and where the same is noted at several places: '?' if another one is to be asked unless N is here, and when it was found
--       out already at another one, the first two parts of that reply
-- Reply: for how many ms nothing is granted, -1 if another place is to be asked; 1 if that is because of a predecessor.
-- Invariant: N names this process before any of its clients is granted anything.
local call, match = redis.call, string.match
local N, G, T = KEYS[1], KEYS[2], KEYS[3]
local promoted, young, younger = ARGV[3] == '1', tonumber(ARGV[6]), tonumber(ARGV[7])
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)

local function wait(why, ms)
  if ms > 0 then call('SET', G, string.format('%s:%.0f', why, now), 'PX', ms) end
end

-- First: a server without memory refuses nothing after this.
call('PEXPIRE', N, ARGV[5])
local run, id, lease = match(call('GET', N) or '', '^(%x+)%-(%x+):(%d+)$')
lease = math.max(tonumber(lease or 0), tonumber(ARGV[4]))
if ARGV[8] == '?' and not run then return {-1, 0} end
if ARGV[9] then
  young = 0
  if tonumber(ARGV[8]) > math.max(call('PTTL', G), 0) then
    wait(ARGV[9] == '1' and 'predecessor' or 'young', tonumber(ARGV[8]))
  end
elseif run then
  -- A master that became a replica and a master again has the same run id, and history of somebody else.
  if run ~= ARGV[1] or promoted and id ~= ARGV[2] then wait('predecessor', lease) end
elseif promoted or T and call('EXISTS', T) == 1 then
  -- Tokens without a name: the last write that arrived was not the first one.
  wait('predecessor', lease)
else
  young = math.max(young, younger)
end
if young > math.max(call('PTTL', G), 0) then wait('young', young) end

-- What a predecessor knew of longer leases may have been lost with it. Those who were granted them know, and those who ask for such:
-- who wants the same lock wants it for as long, as a rule.
local why, since = match(call('GET', G) or '', '^(%a+):(%d+)$')
if why == 'predecessor' and not ARGV[9] then
  local left = tonumber(since) + lease - now
  if left > call('PTTL', G) then call('PEXPIRE', G, left) end
end
call('SET', N, string.format('%s-%s:%.0f', ARGV[1], ARGV[2], lease), 'PX', ARGV[5])
return {math.max(call('PTTL', G), 0), why == 'predecessor' and 1 or 0}
