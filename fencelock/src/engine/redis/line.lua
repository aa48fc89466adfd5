-- Carries out a batch of operations on lines. All that changes a lock happens in here, atomically.
--
-- KEYS, four per operation, all of one slot:
--   K  the lock's name itself: who holds. While it is held exclusively, owner ':' token (a value that nobody else has, as in the
--      common recipe, so that its clients and fencelock exclude each other); 'fencelock:shared' or 'fencelock:permit:N' otherwise
--   T  the newest token, and who got it: token \n owner \n session \n label. A token is a time in µs, that of the grant
--   Q  waiters, a sorted set by time of arrival in µs
--   X  tombstones: owners whose claims were given up and must not come to life by a late message; a sorted set by time in ms
--   and beside Q, under names that differ from its name in one letter:
--   W  records of waiters, and of those who hold together: a hash by owner
--   D  ends of the leases of those who hold together, in µs: a sorted set by owner
-- ARGV: claim window ms, life of T ms, life of Q, W and X ms; then four per operation:
--   operation, owner, ttl ms, and what is noted of its owner: \n owner \n session \n label
--   (for n, r and x the owner is followed by ':' token if that is known: then only this hold is meant, and no other one of the
--   same owner)
-- Operations; a and t are followed by the mode (e, s, p) and, unless both are 0, ':' permits ':' time of arrival:
--   a acquire or wait; also a waiter's look at its place (idempotent)   t acquire or leave it
--   r release   x release for good: leaves a tombstone   n renew   v evict all holders
-- Reply: server time in µs, then per operation one of
--   'token' held for the ttl        {2, arrival, look again in ms, 1 if a foreigner holds and this is the first} waiting
--   {3} busy                        {4, 1 freed | 2 withdrawn | 0 nothing}     {5, 1 | 0} renewed or gone
--   {6, n} in use with n permits    {7} its owner has given it up              {8, count} evicted
--   and, short for the common cases, 4 for {4, 1} and 5 for {5, 1}
-- Invariants: K decides who holds; D and the holders in W mean nothing without it. Nobody is granted a lock past a living
-- waiter. A granted waiter holds for the claim window, until it looks or renews.
--
-- The common case, a lock that nobody else is at, is handled in the loop at the end; the rest is set up when it is needed.

local call = redis.call
local time = call('TIME')
local now = time[1] * 1000000 + time[2]
local now_text = string.format('%.0f', now)
local keep = ARGV[2]

-- Takes a new token for a grant and notes to whom it went. The note outlives the lease.
local function mint(T, note, ttl)
  local life = keep + ttl
  local old = call('SET', T, now_text .. note, 'PX', life, 'GET')
  -- Both start with 16 digits: as texts they compare like the numbers.
  if old and not (old < now_text) then
    local last = tonumber(string.match(old, '^%d+'))
    if last and last >= now then
      local token = string.format('%.0f', last + 1)
      call('SET', T, token .. note, 'PX', life)
      return token
    end
  end
  return now_text
end

local function set_up()
  local match = string.match
  local window, linger, kept = tonumber(ARGV[1]), ARGV[3], tonumber(keep)
  local SHARED, PERMIT = 'fencelock:shared', 'fencelock:permit:'
  local recheck = 5000

  local function str(number) return string.format('%.0f', number) end

  -- Whether K says that several hold together; only then does D mean anything.
  local function together(cur)
    return cur and (cur == SHARED or match(cur, '^' .. PERMIT) ~= nil)
  end

  -- The value of K, after forgetting those who hold together and whose leases are over.
  local function current(K, W, D)
    local cur = call('GET', K)
    if together(cur) then
      local over = call('ZRANGEBYSCORE', D, '-inf', now_text, 'LIMIT', 0, 64)
      for _, owner in ipairs(over) do
        call('ZREM', D, owner)
        call('HDEL', W, owner)
      end
      if #over > 0 and call('ZCARD', D) == 0 then
        call('DEL', K)
        return false
      end
    end
    return cur
  end

  -- The line rule; the twin of `admits` in rule.rs.
  local function admits(cur, D, mode, of)
    if not cur then return true end
    if mode == 's' then return cur == SHARED end
    if mode == 'p' then return cur == PERMIT .. of and call('ZCARD', D) < tonumber(of) end
    return false
  end

  -- Lets K, and what belongs to it, live as long as the longest lease of those who hold together.
  local function prolong(K, W, D)
    local last = call('ZRANGE', D, -1, -1, 'WITHSCORES')[2]
    local ms = last and math.max(1, math.ceil((tonumber(last) - now) / 1000)) or 1
    call('PEXPIRE', K, ms)
    call('PEXPIRE', D, ms + kept)
    call('PEXPIRE', W, ms + kept)
  end

  -- The owner that holds alone, unless it is a client of the common recipe.
  local function owner_of(cur)
    local owner = cur and match(cur, '^(%x+):%d+$')
    return owner and #owner == 32 and owner
  end

  -- Writes down that an owner holds, for `lease` ms.
  local function hold(cur, K, W, D, owner, mode, of, lease, token, note)
    if mode == 'e' then
      call('SET', K, owner .. ':' .. token, 'PX', lease)
      return
    end
    if not cur then call('DEL', D) end
    call('SET', K, mode == 's' and SHARED or PERMIT .. of, 'KEEPTTL')
    call('ZADD', D, str(now + lease * 1000), owner)
    call('HSET', W, owner, 'h\n' .. token .. '\n' .. mode .. '\n' .. of .. note)
    prolong(K, W, D)
  end

  local function send(session, word) return call('PUBLISH', 'fencelock:inbox:' .. session, word) end

  -- In how many ms the first in line should look for itself if nobody tells it anything: when a lease ends, and every now and
  -- then, since a word can get lost. Behind a client of the common recipe, which tells nobody when it releases, soon; then the
  -- second value is 1.
  local function first_look(cur, K, D)
    local left = call('PTTL', K)
    if not together(cur) then
      if not owner_of(cur) then return left < 0 and 800 or math.min(left + 1, 800), 1 end
    elseif cur ~= SHARED then
      -- Whoever leaves first makes room.
      local first = call('ZRANGE', D, 0, 0, 'WITHSCORES')[2]
      left = first and math.ceil((tonumber(first) - now) / 1000) or left
    end
    return math.min(math.max(left, 0) + 1, recheck), 0
  end

  -- Hands over to the waiters that the rule lets hold, skipping those whose client is not there; then, if the line has
  -- moved, tells the one that is first now when to look.
  local function settle(K, T, Q, W, D, moved)
    while true do
      local owner = call('ZRANGE', Q, 0, 0)[1]
      if not owner then return end
      local mode, of, ttl, note, session =
        match(call('HGET', W, owner) or '', '^w\n(%a)\n(%d+)\n(%d+)\n%d+(\n%x+\n(%x+)\n.*)$')
      -- Without a record it was forgotten; without a listener its process is gone, or about to reconnect, and then it takes
      -- its place by its time of arrival.
      local here = 0
      if mode then
        local cur = current(K, W, D)
        if admits(cur, D, mode, of) then
          local lease = math.min(window, tonumber(ttl))
          local token = mint(T, note, ttl)
          here = send(session, 'g\n' .. owner .. '\n' .. token .. '\n' .. now_text .. '\n' .. lease .. '\n' .. K)
          if here > 0 then
            call('ZREM', Q, owner)
            call('HDEL', W, owner)
            hold(cur, K, W, D, owner, mode, of, lease, token, note)
          end
        else
          if not moved then return end
          local again, foreign = first_look(cur, K, D)
          here = send(session, 'h\n' .. owner .. '\n' .. (foreign == 1 and 0 or again) .. '\n' .. K)
          if here > 0 then return end
        end
      end
      if here == 0 then
        call('ZREM', Q, owner)
        call('HDEL', W, owner)
      end
      moved = true
    end
  end

  -- The same for a waiter wherever it stands. Those ahead may be dead and a lease may end without a word: then the first who
  -- lives looks first, and a moment later the next ones do.
  local function look(cur, K, Q, D, owner)
    local again, foreign = first_look(cur, K, D)
    local ahead = call('ZRANK', Q, owner)
    if ahead == 0 then return again, foreign end
    return foreign == 1 and recheck or math.min(again + math.min(30 * ahead, 900), recheck), 0
  end

  -- The number of permits in use, if it is another one.
  local function other_permits(cur, Q, W, of)
    local known = cur and match(cur, '^' .. PERMIT .. '(%d+)$')
    if not known then
      local last = call('ZRANGE', Q, -1, -1)[1]
      known = last and match(call('HGET', W, last) or '', '^w\np\n(%d+)')
    end
    return known and known ~= of and known
  end

  -- The token of an owner that holds already; a new one if its record was evicted. Begins with what a server without memory does not
  -- refuse; after that it refuses nothing.
  local function held(cur, K, T, W, D, owner, mode, of, ttl, note)
    if owner_of(cur) == owner then
      call('PEXPIRE', K, ttl)
      return match(cur, '%d+$')
    end
    if together(cur) and call('ZSCORE', D, owner) then
      call('PEXPIRE', K, ttl)
      local token = match(call('HGET', W, owner) or '', '^h\n(%d+)')
      if not token then
        token = mint(T, note, ttl)
        call('HSET', W, owner, 'h\n' .. token .. '\n' .. mode .. '\n' .. of .. note)
      end
      call('ZADD', D, str(now + ttl * 1000), owner)
      prolong(K, W, D)
      return token
    end
  end

  local function acquire(K, T, Q, W, D, X, op, mode, of, arrival, owner, ttl, note)
    if call('ZSCORE', X, owner) then return {7} end
    local token = held(current(K, W, D), K, T, W, D, owner, mode, of, ttl, note)
    if token then return token end
    if mode == 'p' then
      local known = other_permits(call('GET', K), Q, W, of)
      if known then return {6, known} end
    end
    local place = call('ZSCORE', Q, owner)
    settle(K, T, Q, W, D, false)
    local cur = call('GET', K)
    if place then
      -- It may have been this one's turn; or its record was evicted, and it takes its place anew.
      token = held(cur, K, T, W, D, owner, mode, of, ttl, note)
      if token then return token end
      place = call('ZSCORE', Q, owner)
    end
    if call('EXISTS', Q) == 0 and admits(cur, D, mode, of) then
      token = mint(T, note, ttl)
      hold(cur, K, W, D, owner, mode, of, tonumber(ttl), token, note)
      return token
    end
    if op == 't' then return {3} end
    if not place then
      local last = call('ZRANGE', Q, -1, -1, 'WITHSCORES')[2]
      place = arrival ~= '0' and arrival or str(math.max(now, last and tonumber(last) + 1 or 0))
      call('ZADD', Q, place, owner)
      call('HSET', W, owner, 'w\n' .. mode .. '\n' .. of .. '\n' .. ttl .. '\n' .. now_text .. note)
    end
    call('PEXPIRE', Q, linger)
    if call('PTTL', W) < tonumber(linger) then call('PEXPIRE', W, linger) end
    local again, foreign = look(cur, K, Q, D, owner)
    return {2, str(tonumber(place)), again, foreign}
  end

  -- Whether the hold of an owner together with others is the one with this token, if one is given.
  local function is_hold(W, owner, token)
    local known = match(call('HGET', W, owner) or '', '^h\n(%d+)')
    return not known or token == '' or token == known
  end

  -- Takes an owner out, wherever it stands: 1 held, 2 waited, 0 neither. With a token, only the hold that has it.
  local function remove(K, T, Q, W, D, owner, token)
    local cur = call('GET', K)
    if owner_of(cur) == owner and (token == '' or token == match(cur, '%d+$')) then
      call('DEL', K)
    elseif together(cur) and is_hold(W, owner, token) and call('ZREM', D, owner) == 1 then
      call('HDEL', W, owner)
      if call('ZCARD', D) == 0 then call('DEL', K) else prolong(K, W, D) end
    else
      local first = call('ZRANGE', Q, 0, 0)[1] == owner
      if token ~= '' or call('ZREM', Q, owner) == 0 then return 0 end
      call('HDEL', W, owner)
      if first then settle(K, T, Q, W, D, true) end
      return 2
    end
    settle(K, T, Q, W, D, true)
    return 1
  end

  local function release(K, T, Q, W, D, X, op, owner, token)
    local found = remove(K, T, Q, W, D, owner, token)
    if op == 'x' then
      -- At the end: a server without memory refuses it, but not after something was removed.
      local ms = math.floor(now / 1000)
      call('ZADD', X, str(ms), owner)
      call('ZREMRANGEBYSCORE', X, '-inf', str(ms - linger))
      call('PEXPIRE', X, linger)
    end
    return {4, found}
  end

  local function renew(K, W, D, owner, token, ttl)
    local over = together(call('GET', K)) and is_hold(W, owner, token) and call('ZSCORE', D, owner)
    if not over or tonumber(over) <= now then return {5, 0} end
    -- First, as above.
    call('PEXPIRE', K, ttl)
    call('ZADD', D, str(math.max(tonumber(over), now + ttl * 1000)), owner)
    prolong(K, W, D)
    return {5, 1}
  end

  local function evict(K, T, Q, W, D)
    local cur = current(K, W, D)
    local count = 0
    if together(cur) then
      for _, owner in ipairs(call('ZRANGE', D, 0, -1)) do
        local session = match(call('HGET', W, owner) or '', '^h\n%d+\n%a\n%d+\n%x+\n(%x+)')
        if session then send(session, 'l\n' .. owner) end
        call('HDEL', W, owner)
        count = count + 1
      end
    elseif cur then
      local owner, session = match(call('GET', T) or '', '^%d+\n(%x*)\n(%x*)\n')
      if owner and owner == owner_of(cur) then send(session, 'l\n' .. owner) end
      count = 1
    end
    call('DEL', K, D)
    settle(K, T, Q, W, D, true)
    return {8, count}
  end

  return function(K, T, Q, X, op, who, ttl, note)
    local W = string.gsub(Q, '^(fencelock:%d)q', '%1w')
    local D = string.gsub(Q, '^(fencelock:%d)q', '%1d')
    local owner, token = match(who, '^(%x+):?(%d*)$')
    if op == 'r' or op == 'x' then return release(K, T, Q, W, D, X, op, owner, token) end
    if op == 'n' then return renew(K, W, D, owner, token, ttl) end
    if op == 'v' then return evict(K, T, Q, W, D) end
    local what, mode, of, arrival = match(op, '^(%a)(%a):?(%d*):?(%d*)$')
    if of == '' then of, arrival = '0', '0' end
    return acquire(K, T, Q, W, D, X, what, mode, of, arrival, owner, ttl, note)
  end
end

local slow
local replies = {now_text}
local at = 4
for index = 1, #KEYS, 4 do
  local K, T, Q = KEYS[index], KEYS[index + 1], KEYS[index + 2]
  local op, owner, ttl = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local reply
  if op == 'ae' or op == 'te' then
    if call('EXISTS', K, Q, KEYS[index + 3]) == 0 then
      reply = mint(T, ARGV[at + 3], ttl)
      call('SET', K, owner .. ':' .. reply, 'PX', ttl)
    end
  elseif op == 'r' then
    if call('GET', K) == owner and call('EXISTS', Q) == 0 then
      call('DEL', K)
      reply = 4
    end
  elseif op == 'n' and call('GET', K) == owner then
    if call('PTTL', K) < tonumber(ttl) then call('PEXPIRE', K, ttl) end
    call('PEXPIRE', T, keep + ttl)
    reply = 5
  end
  if not reply then
    slow = slow or set_up()
    reply = slow(K, T, Q, KEYS[index + 3], op, owner, ttl, ARGV[at + 3])
  end
  replies[#replies + 1] = reply
  at = at + 4
end
return replies
