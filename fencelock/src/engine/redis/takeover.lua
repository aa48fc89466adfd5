-- Finds out whether this server process took over from another one, which may have granted leases that it knows nothing of.
--
-- KEYS: N  the process that grants, and the longest lease it may have granted: run id ':' ms
--       G  quarantine: while it exists, nothing is granted to new owners
--       T  the newest token, as in line.lua; not on a cluster
-- ARGV: run id of this process, 1 if it was promoted from a replica, the longest lease of this client in ms, life of N in ms,
--       how long a process that knows of no predecessor is to wait for being young, in ms
-- Reply: for how many ms nothing is granted, and 1 if that is because of a predecessor.
-- Invariant: N names this process before any of its clients is granted anything.
local call = redis.call
local N, G, T = KEYS[1], KEYS[2], KEYS[3]
local run, lease = string.match(call('GET', N) or '', '^(%x+):(%d+)$')
lease = math.max(tonumber(lease or 0), tonumber(ARGV[3]))
local took_over
if run then
  took_over = run ~= ARGV[1]
else
  -- Tokens without a name: the last write that arrived was not the first one.
  took_over = ARGV[2] == '1' or T and call('EXISTS', T) == 1
end
if took_over then
  call('SET', G, 'predecessor', 'PX', lease)
elseif not run and ARGV[5] ~= '0' then
  call('SET', G, 'young', 'PX', ARGV[5], 'NX')
end
call('SET', N, string.format('%s:%.0f', ARGV[1], lease), 'PX', ARGV[4])
return {math.max(call('PTTL', G), 0), call('GET', G) == 'predecessor' and 1 or 0}
