-- One node's part in a batch of operations: it votes on its own, atomically, and knows nothing of the other nodes.
--
-- Keys: for each operation the lock's name, which is the key that decides who holds on this node:
--   K  token ':' owner \n session \n label, a value that nobody else has, as in the common recipe: its clients and fencelock exclude
--      each other
-- Beside it, under names made from K:
--   Q  fencelock:rq:K  waiters, a sorted set of owners by the token that they propose
--   W  fencelock:rw:K  their records, a hash by owner: ttl \n since \n what K is to be
--   X  fencelock:rx:owner:K  the highest token with which this owner gave up before its claim arrived here
-- and for the whole node
--   T  fencelock:redlock:tokens  the highest proposals that this node accepted, a hash by name, each as K is; under '' is when
--      T was begun, in µs, and the highest of all
--   fencelock:redlock:before  what T was before
--   fencelock:redlock:out     it does not vote, and why        fencelock:redlock:waits   somebody waits here; since when it says so, in µs
--   fencelock:redlock:graves  there are keys X
-- A token is 16 digits, a time in µs: as texts they compare like the numbers. So do proposals (token ':' owner), which have 39
-- characters, and values of K.
-- ARGV: how long T lasts in ms, longer than any lease, claim window in ms, life of X and least life of Q and W in ms; then groups of
--   operations: code, count, ttl in ms (for i: how many waiters to show), and then for claims (a, t, A, T) each K and what it is to be, and
--   for all others each K, and then for each what K is to be (c), what it should be (r), or the proposal. That is how the commands want them, and so a group of
--   the common kind is passed on as it is. KEYS is not used: the nodes are not a cluster.
-- Codes: a acquire or wait (again: confirm, or look)   t acquire or leave it   A, T the same, of names that all differ; tokens ascend
--   n renew   c renew, or bring back   r release   x give up: also what is on its way   u take a proposal back   i inspect
--   v evict this proposal   o evict a client of another kind, whoever it is
-- Reply: server time in µs, or 0 if neither that nor whether this node votes matters; a text with one letter per operation (behind \n why
-- this node does not vote, and for how long, if so); and what some letters have to say, in their order:
--   g granted   b busy {K, lease left in ms}   w waits {K, lease left in ms, how many ahead}   l too low {highest accepted}
--   x given up before   y renewed   m nobody holds   n somebody else holds   f freed   d withdrawn   0 nothing   e error {text}
--   i seen {K, lease left in ms, waiters: records}
-- Invariants: a proposal is accepted only above all that were accepted before, or again by the same owner. Nobody is granted the lock
-- past a living waiter whose proposal can be accepted. A waiter that is handed the lock holds for the claim window.

local call, ARGV, unpack = redis.call, ARGV, unpack
local sub, find, byte = string.sub, string.find, string.byte

-- A release that travels alone, and nobody waits: in the fewest steps.
if ARGV[4] == 'r' and #ARGV == 8 then
  local seen = call('MGET', ARGV[7], 'fencelock:redlock:waits')
  if seen[1] == ARGV[8] and not seen[2] then
    call('DEL', ARGV[7])
    return {0, 'f'}
  end
end

local time = call('TIME')
local state = call('MGET', 'fencelock:redlock:out', 'fencelock:redlock:waits', 'fencelock:redlock:graves')
local crowded = state[2] or state[3]
local T, BEFORE = 'fencelock:redlock:tokens', 'fencelock:redlock:before'
local clock = sub('000000000' .. time[1], -10) .. sub('00000' .. time[2], -6)
local answers, extras = {}, {clock, ''}
local since, top

-- Makes sure that what is noted from now on is remembered for long enough, and keeps in mind when T was begun and the highest that was
-- noted. `seen` is what is under ''. A T that is old is put behind a new one, and those behind it are forgotten. While a proposal is
-- ahead of the clock, nothing is: it might be needed for as long.
local function open(seen)
  local ms = tonumber(ARGV[1])
  since, top = sub(seen or '', 1, 16), sub(seen or '', 17)
  if seen and clock - since < ms * 1000 then return end
  local ahead = ((tonumber(sub(top, 1, 16)) or 0) - clock) / 1000
  if ahead <= 60000 then
    if seen then
      call('UNLINK', BEFORE)
      call('RENAME', T, BEFORE)
    end
    ahead = 0
  end
  since = clock
  call('HSET', T, '', since .. top)
  call('PEXPIRE', T, string.format('%.0f', 2 * ms + ahead))
  call('PEXPIRE', BEFORE, string.format('%.0f', ms + ahead))
end

-- All that is not the common case. A function is made anew for each call of the script: these are many, and made when one is needed.
local function set_up()
  local window, linger = ARGV[2], ARGV[3]

  -- Who holds, and all that K says. If fencelock wrote it, the proposal holds; its owner is behind the 17th character, and the session is
  -- 41 to 51 of K.
  local function get(K)
    local value = redis.pcall('GET', K)
    if type(value) == 'table' and value.err then return nil, nil, value.err end
    local ours = value and byte(value, 40) == 10 and byte(value, 52) == 10 and byte(value, 17) == 58
    return ours and sub(value, 1, 39) or value, value
  end

  -- Whether T lets this proposal through; if not, what is in its way.
  local function too_low(K, who)
    local old
    if top then
      old = call('HGET', T, K)
    else
      local seen = call('HMGET', T, '', K)
      open(seen[1])
      old = seen[2]
    end
    old = old or call('HGET', BEFORE, K)
    if old and old > sub(who, 1, 16) and sub(old, 1, 39) ~= who then return sub(old, 1, 16) end
  end

  local function note_token(K, value)
    if not top then open(call('HGET', T, '')) end
    if value > top then top = value end
    call('HSET', T, '', since .. top, K, value)
  end

  local function accept(K, value, lease)
    call('SET', K, value, 'PX', lease)
    note_token(K, value)
  end

  local function forget(K, owner)
    call('HDEL', 'fencelock:rw:' .. K, owner)
    return call('ZREM', 'fencelock:rq:' .. K, owner) == 1
  end

  -- A waiter's record: ttl, since when, and what K is to be.
  local function read(record)
    local at = record and find(record, '\n', 1, true)
    if at then return sub(record, 1, at - 1), sub(record, at + 1, at + 16), sub(record, at + 18) end
  end

  -- Hands a free lock to the first waiter whose client is there and whose proposal can be accepted. One whose proposal is too low is
  -- told to make another one. `skip`: an owner, or a proposal, that is passed over.
  local function settle(K, skip)
    local index = 0
    for _ = 1, 64 do
      local owner = call('ZRANGE', 'fencelock:rq:' .. K, index, index)[1]
      if not owner then return end
      local ttl, _, value = read(call('HGET', 'fencelock:rw:' .. K, owner))
      local who, inbox = value and sub(value, 1, 39), value and 'fencelock:inbox:' .. sub(value, 41, 51)
      local here = 0
      if skip and (owner == skip or who == skip) then
        here = 1
      elseif not who or not tonumber(ttl) then
        here = 0
      elseif too_low(K, who) then
        here = call('PUBLISH', inbox, 'h\n' .. owner .. '\n0\n' .. K)
      else
        local lease = tonumber(ttl) < tonumber(window) and ttl or window
        here = call('PUBLISH', inbox, 'g\n' .. owner .. '\n' .. sub(who, 1, 16) .. '\n' .. clock .. '\n' .. lease .. '\n' .. K)
        if here > 0 then
          forget(K, owner)
          accept(K, value, lease)
          return
        end
      end
      if here > 0 then index = index + 1 else forget(K, owner) end
    end
  end

  local function register(K, who, value, ttl)
    local owner, Q, W = sub(who, 18), 'fencelock:rq:' .. K, 'fencelock:rw:' .. K
    local since, _
    if call('ZADD', Q, sub(who, 1, 16), owner) == 0 then _, since = read(call('HGET', W, owner)) end
    call('HSET', W, owner, ttl .. '\n' .. (since or clock) .. '\n' .. value)
    local ahead = call('ZRANK', Q, owner)
    -- The line outlives its last sign of life by `linger` and a half at most, and the mark outlives the line.
    if ahead == 0 or call('PTTL', W) < tonumber(linger) then
      local long = string.format('%.0f', linger * 1.5)
      call('PEXPIRE', Q, long)
      call('PEXPIRE', W, long)
    end
    if not state[2] or clock - state[2] > linger * 500 then
      state[2] = clock
      call('SET', 'fencelock:redlock:waits', clock, 'PX', string.format('%.0f', linger * 2))
    end
    return ahead
  end

  local function acquire(code, K, value, ttl)
    local who, owner = sub(value, 1, 39), sub(value, 18, 39)
    if state[3] then
      local grave = call('GET', 'fencelock:rx:' .. owner .. ':' .. K)
      if grave and grave >= sub(who, 1, 16) then return 'x' end
    end
    local cur, _, err = get(K)
    if err then
      extras[#extras + 1] = err
      return 'e'
    end
    if cur == who then
      call('PEXPIRE', K, ttl)
      forget(K, owner)
      return 'g'
    end
    if not cur then
      local first = call('ZRANGE', 'fencelock:rq:' .. K, 0, 0)[1]
      if first and first ~= owner then
        settle(K, owner)
        cur = get(K)
      end
      if not cur then
        local low = too_low(K, who)
        if low then
          extras[#extras + 1] = low
          return 'l'
        end
        accept(K, value, ttl)
        if first then forget(K, owner) end
        return 'g'
      end
    end
    local left = call('PTTL', K)
    if code == 't' then
      extras[#extras + 1] = {cur, left}
      return 'b'
    end
    extras[#extras + 1] = {cur, left, register(K, who, value, ttl)}
    return 'w'
  end

  local function renew(code, K, value, ttl)
    local cur, known, err = get(K)
    if err then
      extras[#extras + 1] = err
      return 'e'
    end
    if cur == sub(value, 1, 39) then
      if call('PTTL', K) < tonumber(ttl) then call('PEXPIRE', K, ttl) end
      value = known
    elseif cur then
      return 'n'
    elseif code == 'n' then
      return 'm'
    else
      call('SET', K, value, 'PX', ttl)
    end
    -- A token that is in use must not be forgotten.
    if not call('HGET', T, K) then
      local old = call('HGET', BEFORE, K)
      note_token(K, old and old > value and old or value)
    end
    return 'y'
  end

  local function release(code, K, what)
    local who = sub(what, 1, 39)
    local cur, _, err = get(K)
    if err then
      extras[#extras + 1] = err
      return 'e'
    end
    local owner = sub(who, 18)
    local mine = cur == who or code == 'x' and cur and #cur == #who and sub(cur, 18) == owner and cur <= who
    if mine then
      if code == 'x' then forget(K, owner) end
      call('DEL', K)
      settle(K, who)
      return 'f'
    end
    if code == 'u' then
      local _, _, value = read(call('HGET', 'fencelock:rw:' .. K, owner))
      if value and sub(value, 1, 39) == who then forget(K, owner) end
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

  -- Whoever asks for it has seen who holds. Somebody else may hold by now, who was handed the lock when its holder was told.
  local function evict(code, K, who)
    local cur, value, err = get(K)
    if err then
      extras[#extras + 1] = err
      return 'e'
    end
    local ours = cur ~= value
    if not cur or code == 'v' and cur ~= who or code == 'o' and ours then return '0' end
    if ours then call('PUBLISH', 'fencelock:inbox:' .. sub(value, 41, 51), 'l\n' .. sub(cur, 18)) end
    call('DEL', K)
    settle(K)
    return 'f'
  end

  local function inspect(K, count)
    local _, value, err = get(K)
    if err then
      extras[#extras + 1] = err
      return 'e'
    end
    -- A waiter whose client does not listen is dead, or on its way back to its place.
    local waiters, listens, seen = {}, {}, {}
    if tonumber(count) > 0 then seen = call('ZRANGE', 'fencelock:rq:' .. K, 0, tonumber(count) - 1) end
    for _, owner in ipairs(seen) do
      local record = call('HGET', 'fencelock:rw:' .. K, owner)
      local _, _, value = read(record)
      local session = value and sub(value, 41, 51)
      if session then
        listens[session] = listens[session] or call('PUBSUB', 'NUMSUB', 'fencelock:inbox:' .. session)[2]
        if listens[session] > 0 then waiters[#waiters + 1] = record end
      end
    end
    extras[#extras + 1] = {value or '', call('PTTL', K), waiters}
    return 'i'
  end

  return function(code, K, what, ttl)
    if code == 'a' or code == 't' then return acquire(code, K, what, ttl) end
    if code == 'n' or code == 'c' then return renew(code, K, what, ttl) end
    if code == 'v' or code == 'o' then return evict(code, K, what) end
    if code == 'i' then return inspect(K, ttl) end
    return release(code, K, what)
  end
end

local slow
local function one(code, K, what, ttl)
  slow = slow or set_up()
  local answer = slow(code, K, what, ttl)
  -- Whoever waits now, or has given up, must be seen by the rest of the batch.
  if answer == 'w' then crowded = true end
  if answer == '0' and code == 'x' then state[3], crowded = '1', true end
  answers[#answers + 1] = answer
end

-- The common case of a claim: nobody holds, nobody waits, and the proposal is the highest so far, or the highest for this name.
local function claim(code, first, last, ttl)
  if not top then open(call('HGET', T, '')) end
  local highest_token = sub(top, 1, 16)
  -- If that is so for all of a group, they are granted together.
  if (code == 'A' or code == 'T') and not crowded and sub(ARGV[first + 1], 1, 16) > highest_token
    and call('MSETNX', unpack(ARGV, first, last)) == 1 then
    local over = string.format('%.0f', sub(clock, 1, 13) + ttl)
    for index = first, last, 2 do call('PEXPIREAT', ARGV[index], over) end
    top = ARGV[last]
    call('HSET', T, '', since .. top, unpack(ARGV, first, last))
    answers[#answers + 1] = string.rep('g', (last - first + 1) / 2)
    return
  end
  code = string.lower(code)
  -- What is accepted and not in T yet. It ascends.
  local fields, newest = {'', ''}, ''
  local function note()
    if newest == '' then return end
    if newest > top then top = newest end
    fields[2] = since .. top
    call('HSET', T, unpack(fields))
    fields, newest = {'', ''}, ''
  end
  for index = first, last, 2 do
    local K, value = ARGV[index], ARGV[index + 1]
    local free = value > newest
    if crowded and call('EXISTS', 'fencelock:rq:' .. K, 'fencelock:rx:' .. sub(value, 18, 39) .. ':' .. K) > 0 then free = false end
    if free and sub(value, 1, 16) <= highest_token then
      local old = call('HGET', T, K) or call('HGET', BEFORE, K)
      free = not old or old < sub(value, 1, 16) or sub(old, 1, 39) == sub(value, 1, 39)
    end
    if free and call('SET', K, value, 'NX', 'PX', ttl) then
      newest = value
      fields[#fields + 1] = K
      fields[#fields + 1] = value
      answers[#answers + 1] = 'g'
    else
      note()
      one(code, K, value, ttl)
    end
  end
  note()
end

-- Releases: those who hold and whom nobody waits for in two steps, however many they are.
local function release(first, count, ttl)
  local values, others = call('MGET', unpack(ARGV, first, first + count - 1)), 0
  for index = 1, count do
    -- What is behind the proposal may differ: an owner may have come in again with another label.
    local value, what = values[index], ARGV[first + count - 1 + index]
    if value ~= what and not (value and sub(value, 1, 39) == sub(what, 1, 39))
      or state[2] and call('EXISTS', 'fencelock:rq:' .. ARGV[first + index - 1]) == 1 then
      values[index], others = false, others + 1
    end
  end
  if others == 0 then
    call('DEL', unpack(ARGV, first, first + count - 1))
    answers[#answers + 1] = string.rep('f', count)
    return
  end
  local free = {}
  for index = 1, count do
    if values[index] then free[#free + 1] = ARGV[first + index - 1] end
  end
  if #free > 0 then call('DEL', unpack(free)) end
  for index = 1, count do
    if values[index] then
      answers[#answers + 1] = 'f'
    else
      one('r', ARGV[first + index - 1], ARGV[first + count - 1 + index], ttl)
    end
  end
end

local at, last = 4, #ARGV
while at < last do
  local code, count, ttl = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  at = at + 3
  -- One that travels alone where somebody waits is as a rule one of those.
  local rival = crowded and count == 1
  local claims = find('aAtT', code, 1, true)
  if claims and not rival then
    claim(code, at, at + 2 * count - 1, ttl)
  elseif code == 'r' and not rival then
    release(at, count, ttl)
  else
    if claims then code = string.lower(code) end
    for index = 0, count - 1 do one(code, ARGV[at + index], ARGV[at + count + index], ttl) end
  end
  at = at + 2 * count
end

extras[2] = table.concat(answers)
if state[1] then extras[2] = extras[2] .. '\n' .. state[1] .. '\n' .. call('PTTL', 'fencelock:redlock:out') end
return extras
