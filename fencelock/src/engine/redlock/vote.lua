-- One node's part in a batch of operations: it votes on its own, atomically, and knows nothing of the other nodes.
--
-- KEYS: for each operation the lock's name, which is the key that decides who holds on this node:
--   K  token ':' owner, a value that nobody else has, as in the common recipe: its clients and fencelock exclude each other
-- Beside it, under names made from K:
--   T  fencelock:rt:K  the highest proposal that this node accepted, and whose: token ':' owner \n session \n label
--   Q  fencelock:rq:K  waiters, a sorted set of owners by the token that they propose
--   W  fencelock:rw:K  their records, a hash by owner: ttl \n since \n token ':' owner \n session \n label
--   X  fencelock:rx:owner:K  the highest token with which this owner gave up before its claim arrived here
-- and for the whole node
--   fencelock:redlock:out     it does not vote, and why        fencelock:redlock:waits   somebody waits here
--   fencelock:redlock:graves  there are keys X
-- A token is 16 digits, a time in µs: as texts they compare like the numbers.
-- ARGV: how long T outlives the lease in ms, claim window in ms, life of Q, W and X in ms; then groups of operations, in the order
--   of KEYS: code, count, ttl in ms, \n session \n label (for i: how many waiters to show), and for each operation token ':' owner
-- Codes: a acquire or wait (again: confirm, or look)   t acquire or leave it   n renew   c renew, or bring back
--   r release   x give up: also what is on its way   u take a proposal back   v evict   i inspect
-- Reply: server time in µs (with \n and the reason, if this node does not vote), a text with one letter per operation, and what some
-- letters have to say, in their order:
--   g granted   b busy {K, lease left in ms}   w waits {K, lease left in ms, how many ahead}   l too low {highest accepted}
--   x given up before   y renewed   m nobody holds   n somebody else holds   f freed   d withdrawn   0 nothing   e error {text}
--   i seen {K, lease left in ms, T, waiters: records}
-- Invariants: a proposal is accepted only above all that were accepted before, or again by the same owner. Nobody is granted the lock
-- past a living waiter whose proposal can be accepted. A waiter that is handed the lock holds for the claim window.

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local state = call('MGET', 'fencelock:redlock:out', 'fencelock:redlock:waits', 'fencelock:redlock:graves')
local crowded = state[2] or state[3]
local sub = string.sub
local RT = 'fencelock:rt:'
local keep = tonumber(ARGV[1])
-- A proposal beyond this is remembered for longer: until this node's clock has passed it by as much as that of any other.
local horizon = string.format('%.0f', now + 60000000)
local answers, extras = {}, {'', ''}

local function life(who, ttl)
  local ms = keep + ttl
  if who > horizon then ms = ms + (tonumber(sub(who, 1, 16)) - now) / 1000 end
  return string.format('%.0f', ms)
end

local function set_up()
  local match = string.match
  local window, linger = tonumber(ARGV[2]), ARGV[3]

  local function owner_of(who) return sub(who, 18) end

  local function say(extra)
    extras[#extras + 1] = extra
  end

  local function get(K)
    local cur = redis.pcall('GET', K)
    if type(cur) == 'table' and cur.err then return nil, cur.err end
    return cur
  end

  -- Whether T lets this proposal through; if not, what is in its way.
  local function too_low(K, who)
    local old = call('GET', RT .. K)
    if old and old > sub(who, 1, 16) and sub(old, 1, #who) ~= who then return sub(old, 1, 16) end
  end

  local function accept(K, who, lease, ttl, note)
    call('SET', K, who, 'PX', lease)
    call('SET', RT .. K, who .. note, 'PX', life(who, ttl))
  end

  local function forget(K, owner)
    call('HDEL', 'fencelock:rw:' .. K, owner)
    return call('ZREM', 'fencelock:rq:' .. K, owner) == 1
  end

  local function send(session, word) return call('PUBLISH', 'fencelock:inbox:' .. session, word) end

  -- Hands a free lock to the first waiter whose client is there and whose proposal can be accepted. One whose proposal is too low is
  -- told to make another one. `skip`: an owner, or a proposal, that is passed over.
  local function settle(K, skip)
    local index = 0
    for _ = 1, 64 do
      local owner = call('ZRANGE', 'fencelock:rq:' .. K, index, index)[1]
      if not owner then return end
      local ttl, who, note, session =
        match(call('HGET', 'fencelock:rw:' .. K, owner) or '', '^(%d+)\n%d+\n(%d+:%x+)(\n(%x+)\n.*)$')
      local here = 0
      if skip and (owner == skip or who == skip) then
        here = 1
      elseif not who then
        here = 0
      elseif too_low(K, who) then
        here = send(session, 'h\n' .. owner .. '\n0\n' .. K)
      else
        local lease = math.min(window, tonumber(ttl))
        here = send(session, 'g\n' .. owner .. '\n' .. sub(who, 1, 16) .. '\n' .. string.format('%.0f', now) .. '\n' .. lease .. '\n' .. K)
        if here > 0 then
          forget(K, owner)
          accept(K, who, lease, ttl, note)
          return
        end
      end
      if here > 0 then index = index + 1 else forget(K, owner) end
    end
  end

  local function register(K, who, ttl, note)
    local owner, Q, W = owner_of(who), 'fencelock:rq:' .. K, 'fencelock:rw:' .. K
    local since = match(call('HGET', W, owner) or '', '^%d+\n(%d+)') or string.format('%.0f', now)
    call('ZADD', Q, sub(who, 1, 16), owner)
    call('HSET', W, owner, ttl .. '\n' .. since .. '\n' .. who .. note)
    call('PEXPIRE', Q, linger)
    call('PEXPIRE', W, linger)
    call('SET', 'fencelock:redlock:waits', 1, 'PX', linger)
    return call('ZRANK', Q, owner)
  end

  local function acquire(code, K, who, ttl, note)
    local owner = owner_of(who)
    if state[3] then
      local grave = call('GET', 'fencelock:rx:' .. owner .. ':' .. K)
      if grave and grave >= sub(who, 1, 16) then return 'x' end
    end
    local cur, err = get(K)
    if err then say(err) return 'e' end
    if cur == who then
      call('PEXPIRE', K, ttl)
      forget(K, owner)
      return 'g'
    end
    if not cur then
      local first = call('ZRANGE', 'fencelock:rq:' .. K, 0, 0)[1]
      if first and first ~= owner then
        settle(K, owner)
        cur = call('GET', K)
      end
      if not cur then
        local low = too_low(K, who)
        if low then say(low) return 'l' end
        accept(K, who, ttl, ttl, note)
        if first then forget(K, owner) end
        return 'g'
      end
    end
    local left = call('PTTL', K)
    if code == 't' then say({cur, left}) return 'b' end
    say({cur, left, register(K, who, ttl, note)})
    return 'w'
  end

  local function renew(code, K, who, ttl, note)
    local cur, err = get(K)
    if err then say(err) return 'e' end
    if cur == who then
      if call('PTTL', K) < tonumber(ttl) then call('PEXPIRE', K, ttl) end
      call('PEXPIRE', RT .. K, life(who, ttl))
      return 'y'
    end
    if cur then return 'n' end
    if code == 'n' then return 'm' end
    call('SET', K, who, 'PX', ttl)
    local old = call('GET', RT .. K)
    if not old or old < who then call('SET', RT .. K, who .. note, 'PX', life(who, ttl)) end
    return 'y'
  end

  local function release(code, K, who)
    local cur, err = get(K)
    if err then say(err) return 'e' end
    local owner = owner_of(who)
    local mine = cur == who or code == 'x' and cur and #cur == #who and owner_of(cur) == owner and cur <= who
    if mine then
      if code == 'x' then forget(K, owner) end
      call('DEL', K)
      settle(K, who)
      return 'f'
    end
    if code == 'u' then
      local record = call('HGET', 'fencelock:rw:' .. K, owner)
      if record and match(record, '^%d+\n%d+\n(%d+:%x+)') == who then forget(K, owner) end
      return '0'
    end
    local score = call('ZSCORE', 'fencelock:rq:' .. K, owner)
    if score and tonumber(score) <= tonumber(sub(who, 1, 16)) then
      forget(K, owner)
      if not cur then settle(K) end
      return 'd'
    end
    if code == 'x' then
      -- Its claim may still be on its way.
      call('SET', 'fencelock:rx:' .. owner .. ':' .. K, sub(who, 1, 16), 'PX', linger)
      call('SET', 'fencelock:redlock:graves', 1, 'PX', linger)
    end
    return '0'
  end

  local function evict(K)
    local cur, err = get(K)
    if err then say(err) return 'e' end
    if not cur then return '0' end
    local record = call('GET', RT .. K) or ''
    local session = sub(record, 1, #cur) == cur and match(sub(record, #cur + 1), '^\n(%x+)\n')
    if session then send(session, 'l\n' .. owner_of(cur)) end
    call('DEL', K)
    settle(K)
    return 'f'
  end

  local function inspect(K, count)
    local cur, err = get(K)
    if err then say(err) return 'e' end
    -- A waiter whose client does not listen is dead, or on its way back to its place.
    local waiters, listens = {}, {}
    for _, owner in ipairs(call('ZRANGE', 'fencelock:rq:' .. K, 0, tonumber(count) - 1)) do
      local record = call('HGET', 'fencelock:rw:' .. K, owner)
      local session = record and match(record, '^%d+\n%d+\n%d+:%x+\n(%x+)\n')
      if session then
        listens[session] = listens[session] or call('PUBSUB', 'NUMSUB', 'fencelock:inbox:' .. session)[2]
        if listens[session] > 0 then waiters[#waiters + 1] = record end
      end
    end
    say({cur or '', call('PTTL', K), call('GET', RT .. K) or '', waiters})
    return 'i'
  end

  return function(code, K, who, ttl, note)
    if code == 'a' or code == 't' then return acquire(code, K, who, ttl, note) end
    if code == 'n' or code == 'c' then return renew(code, K, who, ttl, note) end
    if code == 'v' then return evict(K) end
    if code == 'i' then return inspect(K, note) end
    return release(code, K, who)
  end
end

local slow
local done, at = 0, 4
while done < #KEYS do
  local code, count, ttl, note = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
  at = at + 3
  local usual = code ~= 'i' and string.format('%.0f', keep + ttl)
  local claims = not crowded and (code == 'a' or code == 't')
  if not state[2] and code == 'r' then
    -- Those who hold and whom nobody waits for: in two steps, however many they are.
    local values, free = call('MGET', unpack(KEYS, done + 1, done + count)), {}
    for index = 1, count do
      if values[index] and values[index] == ARGV[at + index] then
        free[#free + 1] = KEYS[done + index]
        answers[done + index] = 'f'
      end
    end
    if #free > 0 then call('DEL', unpack(free)) end
  end
  for index = done + 1, done + count do
    at = at + 1
    local K, who = KEYS[index], ARGV[at]
    local answer = answers[index]
    if claims then
      -- The common case: nobody holds, nobody waits.
      if call('SET', K, who, 'NX', 'PX', ttl) then
        local T, ms = RT .. K, who > horizon and life(who, ttl) or usual
        local old = call('SET', T, who .. note, 'PX', ms, 'GET')
        answer = 'g'
        if old and old > sub(who, 1, 16) and sub(old, 1, #who) ~= who then
          call('SET', T, old, 'PX', ms)
          call('DEL', K)
          extras[#extras + 1] = sub(old, 1, 16)
          answer = 'l'
        end
      end
    end
    if not answer then
      slow = slow or set_up()
      answer = slow(code, K, who, ttl, note)
      -- Whoever waits now must be seen by the rest of the batch.
      if answer == 'w' then claims, state[2], crowded = false, '1', true end
      if answer == '0' and code == 'x' then state[3], crowded = '1', true end
    end
    answers[index] = answer
  end
  done = done + count
  at = at + 1
end

local head = string.format('%.0f', now)
if state[1] then head = head .. '\n' .. state[1] .. '\n' .. call('PTTL', 'fencelock:redlock:out') end
extras[1], extras[2] = head, table.concat(answers)
return extras
