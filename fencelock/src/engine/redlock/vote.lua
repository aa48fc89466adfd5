-- One node's part in a batch of operations: it votes on its own, atomically, and knows nothing of the other nodes.
--
-- KEYS: for each operation the lock's name, which is the key that decides who holds on this node:
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
-- A token is 16 digits, a time in µs: as texts they compare like the numbers. So do proposals (token ':' owner), which have 49
-- characters, and values of K.
-- ARGV: how long T lasts in ms, longer than any lease, claim window in ms, life of X and least life of Q and W in ms; then groups of operations, in the
--   order of KEYS: code, count, ttl in ms (for i: how many waiters to show), and for each operation what K is to be (a, t, A, T, c) or
--   the proposal
-- Codes: a acquire or wait (again: confirm, or look)   t acquire or leave it   A, T the same, of names that all differ
--   n renew   c renew, or bring back   r release   x give up: also what is on its way   u take a proposal back   i inspect
--   v evict this proposal   o evict a client of another kind, whoever it is
-- Reply: server time in µs, or 0 if neither that nor whether this node votes matters; a text with one letter per operation (behind \n why
-- this node does not vote, and for how long, if so); and what some letters have to say, in their order:
--   g granted   b busy {K, lease left in ms}   w waits {K, lease left in ms, how many ahead}   l too low {highest accepted}
--   x given up before   y renewed   m nobody holds   n somebody else holds   f freed   d withdrawn   0 nothing   e error {text}
--   i seen {K, lease left in ms, waiters: records}
-- Invariants: a proposal is accepted only above all that were accepted before, or again by the same owner. Nobody is granted the lock
-- past a living waiter whose proposal can be accepted. A waiter that is handed the lock holds for the claim window.

local call, KEYS, ARGV = redis.call, KEYS, ARGV

-- A release that travels alone, and nobody waits: in the fewest steps.
if #KEYS == 1 and ARGV[4] == 'r' then
  local seen = call('MGET', KEYS[1], 'fencelock:redlock:waits')
  if seen[1] and not seen[2] and string.find(seen[1], ARGV[7], 1, true) == 1 then
    call('DEL', KEYS[1])
    return {0, 'f'}
  end
end

local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local state = call('MGET', 'fencelock:redlock:out', 'fencelock:redlock:waits', 'fencelock:redlock:graves')
local crowded = state[2] or state[3]
local sub = string.sub
local T, BEFORE = 'fencelock:redlock:tokens', 'fencelock:redlock:before'
local answers, extras = {}, {time[1] .. sub('00000' .. time[2], -6), ''}
local since, top

-- Makes sure that what is noted from now on is remembered for long enough, and returns when T was begun and the highest that was
-- noted. A T that is old is put behind a new one, and those behind it are forgotten. While a proposal is ahead of the clock, nothing
-- is: it might be needed for as long.
local function open(now)
  local call, ms = redis.call, tonumber(ARGV[1])
  local seen = call('HGET', T, '')
  local since, top = string.sub(seen or '', 1, 16), string.sub(seen or '', 17)
  if seen and now - since < ms * 1000 then return since, top end
  local ahead = ((tonumber(string.sub(top, 1, 16)) or 0) - now) / 1000
  if ahead <= 60000 then
    if seen then
      call('UNLINK', BEFORE)
      call('RENAME', T, BEFORE)
    end
    ahead = 0
  end
  since = string.format('%016.0f', now)
  call('HSET', T, '', since .. top)
  call('PEXPIRE', T, string.format('%.0f', 2 * ms + ahead))
  call('PEXPIRE', BEFORE, string.format('%.0f', ms + ahead))
  return since, top
end

local function set_up()
  local match = string.match
  local window, linger = tonumber(ARGV[2]), ARGV[3]

  local function owner_of(who) return sub(who, 18) end

  -- The proposal in a value of K; any other value as it is.
  local function proposal(value) return match(value, '^(%d+:%x+)\n%x+\n') or value end

  local function say(extra)
    extras[#extras + 1] = extra
  end

  -- Who holds, and all that K says.
  local function get(K)
    local value = redis.pcall('GET', K)
    if type(value) == 'table' and value.err then return nil, nil, value.err end
    return value and proposal(value), value
  end

  -- Whether T lets this proposal through; if not, what is in its way.
  local function too_low(K, who)
    local old = call('HGET', T, K) or call('HGET', BEFORE, K)
    if old and old > sub(who, 1, 16) and sub(old, 1, 49) ~= who then return sub(old, 1, 16) end
  end

  local function note_token(K, value)
    if not top then since, top = open(now) end
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

  local function send(session, word) return call('PUBLISH', 'fencelock:inbox:' .. session, word) end

  -- Hands a free lock to the first waiter whose client is there and whose proposal can be accepted. One whose proposal is too low is
  -- told to make another one. `skip`: an owner, or a proposal, that is passed over.
  local function settle(K, skip)
    local index = 0
    for _ = 1, 64 do
      local owner = call('ZRANGE', 'fencelock:rq:' .. K, index, index)[1]
      if not owner then return end
      local ttl, value = match(call('HGET', 'fencelock:rw:' .. K, owner) or '', '^(%d+)\n%d+\n(.*)$')
      local who, session = match(value or '', '^(%d+:%x+)\n(%x+)\n')
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
          accept(K, value, lease)
          return
        end
      end
      if here > 0 then index = index + 1 else forget(K, owner) end
    end
  end

  local function register(K, who, value, ttl)
    local owner, Q, W = owner_of(who), 'fencelock:rq:' .. K, 'fencelock:rw:' .. K
    local since = match(call('HGET', W, owner) or '', '^%d+\n(%d+)')
    call('ZADD', Q, sub(who, 1, 16), owner)
    call('HSET', W, owner, ttl .. '\n' .. (since or string.format('%.0f', now)) .. '\n' .. value)
    local ahead = call('ZRANK', Q, owner)
    -- The line outlives its last sign of life by `linger` and a half at most, and the mark outlives the line.
    if ahead == 0 or call('PTTL', W) < tonumber(linger) then
      local long = string.format('%.0f', linger * 1.5)
      call('PEXPIRE', Q, long)
      call('PEXPIRE', W, long)
    end
    if not state[2] or now - state[2] > linger * 500 then
      state[2] = string.format('%.0f', now)
      call('SET', 'fencelock:redlock:waits', state[2], 'PX', string.format('%.0f', linger * 2))
    end
    return ahead
  end

  local function acquire(code, K, value, ttl)
    local who = proposal(value)
    local owner = owner_of(who)
    if state[3] then
      local grave = call('GET', 'fencelock:rx:' .. owner .. ':' .. K)
      if grave and grave >= sub(who, 1, 16) then return 'x' end
    end
    local cur, _, err = get(K)
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
        cur = get(K)
      end
      if not cur then
        local low = too_low(K, who)
        if low then say(low) return 'l' end
        accept(K, value, ttl)
        if first then forget(K, owner) end
        return 'g'
      end
    end
    local left = call('PTTL', K)
    if code == 't' then say({cur, left}) return 'b' end
    say({cur, left, register(K, who, value, ttl)})
    return 'w'
  end

  local function renew(code, K, value, ttl)
    local cur, known, err = get(K)
    if err then say(err) return 'e' end
    if cur == proposal(value) then
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

  local function release(code, K, who)
    local cur, _, err = get(K)
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

  -- Whoever asks for it has seen who holds. Somebody else may hold by now, who was handed the lock when its holder was told.
  local function evict(code, K, who)
    local cur, value, err = get(K)
    if err then say(err) return 'e' end
    local session = value and match(value, '^%d+:%x+\n(%x+)\n')
    if not cur or code == 'v' and cur ~= who or code == 'o' and session then return '0' end
    if session then send(session, 'l\n' .. owner_of(cur)) end
    call('DEL', K)
    settle(K)
    return 'f'
  end

  local function inspect(K, count)
    local _, value, err = get(K)
    if err then say(err) return 'e' end
    -- A waiter whose client does not listen is dead, or on its way back to its place.
    local waiters, listens, seen = {}, {}, {}
    if tonumber(count) > 0 then seen = call('ZRANGE', 'fencelock:rq:' .. K, 0, tonumber(count) - 1) end
    for _, owner in ipairs(seen) do
      local record = call('HGET', 'fencelock:rw:' .. K, owner)
      local session = record and match(record, '^%d+\n%d+\n%d+:%x+\n(%x+)\n')
      if session then
        listens[session] = listens[session] or call('PUBSUB', 'NUMSUB', 'fencelock:inbox:' .. session)[2]
        if listens[session] > 0 then waiters[#waiters + 1] = record end
      end
    end
    say({value or '', call('PTTL', K), waiters})
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
local done, at = 0, 4
while done < #KEYS do
  local code, count, ttl = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2]
  local distinct = code == 'A' or code == 'T'
  if distinct then code = string.lower(code) end
  at = at + 2
  -- One that travels alone where somebody waits is as a rule one of those.
  local rival = crowded and count == 1
  if (code == 'a' or code == 't') and not rival then
    -- The common case: nobody holds, nobody waits, and the proposal is the highest so far, or the highest for this name.
    if not top then since, top = open(now) end
    -- If that is so for all of a group, they are granted together.
    local granted
    local highest_token = sub(top, 1, 16)
    if distinct and not crowded and sub(ARGV[at + 1], 1, 16) > highest_token then
      local items, highest = {}, ''
      for index = 1, count do
        local value = ARGV[at + index]
        if value <= highest then
          highest = nil
          break
        end
        highest = value
        items[2 * index - 1], items[2 * index] = KEYS[done + index], value
      end
      if highest and call('MSETNX', unpack(items)) == 1 then
        for index = done + 1, done + count do
          call('PEXPIRE', KEYS[index], ttl)
          answers[index] = 'g'
        end
        top = highest
        call('HSET', T, '', since .. top, unpack(items))
        granted = true
      end
    end
    -- What is accepted and not in T yet. It ascends.
    local fields, last = {'', ''}, ''
    for index = 1, granted and 0 or count do
      local K, value = KEYS[done + index], ARGV[at + index]
      local free = value > last
      if crowded and call('EXISTS', 'fencelock:rq:' .. K, 'fencelock:rx:' .. sub(value, 18, 49) .. ':' .. K) > 0 then free = false end
      if free and sub(value, 1, 16) <= highest_token then
        local old = call('HGET', T, K) or call('HGET', BEFORE, K)
        free = not old or old < sub(value, 1, 16) or sub(old, 1, 49) == sub(value, 1, 49)
      end
      if free and call('SET', K, value, 'NX', 'PX', ttl) then
        last = value
        fields[#fields + 1] = K
        fields[#fields + 1] = value
        answers[done + index] = 'g'
      else
        if last ~= '' then
          if last > top then top = last end
          fields[2] = since .. top
          call('HSET', T, unpack(fields))
          fields, last = {'', ''}, ''
        end
        slow = slow or set_up()
        local answer = slow(code, K, value, ttl)
        answers[done + index] = answer
        -- Whoever waits now must be seen by the rest of the batch.
        if answer == 'w' then crowded = true end
      end
    end
    if last ~= '' then
      if last > top then top = last end
      fields[2] = since .. top
      call('HSET', T, unpack(fields))
    end
  else
    if code == 'r' and not rival then
      -- Those who hold and whom nobody waits for: in two steps, however many they are.
      local values, free, freed, find = call('MGET', unpack(KEYS, done + 1, done + count)), {}, 0, string.find
      for index = 1, count do
        local value, K = values[index], KEYS[done + index]
        if value and find(value, ARGV[at + index], 1, true) == 1
          and not (state[2] and call('EXISTS', 'fencelock:rq:' .. K) == 1) then
          freed = freed + 1
          free[freed] = K
          answers[done + index] = 'f'
        end
      end
      if freed > 0 then call('DEL', unpack(free)) end
    end
    for index = 1, count do
      if not answers[done + index] then
        slow = slow or set_up()
        local answer = slow(code, KEYS[done + index], ARGV[at + index], ttl)
        if answer == 'w' then crowded = true end
        if answer == '0' and code == 'x' then state[3], crowded = '1', true end
        answers[done + index] = answer
      end
    end
  end
  done = done + count
  at = at + count + 1
end

extras[2] = table.concat(answers)
if state[1] then extras[2] = extras[2] .. '\n' .. state[1] .. '\n' .. call('PTTL', 'fencelock:redlock:out') end
return extras
