-- Carries out one command if the token is not older than the newest that this resource has seen, and keeps the token.
--
-- KEYS[1]  where the newest token is kept
-- KEYS[2…] the keys that the command uses
-- ARGV[1]  the token: decimal digits, no leading zero
-- ARGV[2]  how long the token is kept without another write, in ms; 0 for ever
-- ARGV[3…] the command; none to show the token only
-- reply    {1, answer of the command}, or {0, newest token}: refused, nothing was changed
--
-- Invariants: the kept token never goes down. A command that fails changes neither the data nor the kept token.

-- Tokens do not fit into Lua's numbers, so they are compared as text: the longer one is the greater one.
local function older(a, b)
    if #a ~= #b then return #a < #b end
    return a < b
end

local newest = redis.call('GET', KEYS[1])
if newest and older(ARGV[1], newest) then
    return {0, newest}
end
local answer = false
if ARGV[3] then
    answer = redis.call(unpack(ARGV, 3))
end
if ARGV[2] == '0' then
    redis.call('SET', KEYS[1], ARGV[1])
else
    redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
end
return {1, answer}
