-- Replaces a value if it is still the one that was read. The key keeps its time to live.
--
-- KEYS[1]  the key
-- ARGV[1]  '1' when there was a value, '0' when there was none
-- ARGV[2]  the value that was read
-- ARGV[3]  'set' or 'delete'
-- ARGV[4]  the new value
-- reply    1 when it was replaced, 0 when somebody else changed it: nothing was changed

local value = redis.call('GET', KEYS[1])
if ARGV[1] == '1' then
    if value ~= ARGV[2] then return 0 end
elseif value then
    return 0
end
if ARGV[3] == 'delete' then
    redis.call('DEL', KEYS[1])
else
    redis.call('SET', KEYS[1], ARGV[4], 'KEEPTTL')
end
return 1
