-- Carries out a batch of operations on lines. All that changes a lock happens in here, atomically.
--
-- Operations of the same kind, lifetime and note travel as a group.
-- KEYS, per group all K, then all Q, then (not for r and n) all X of its operations, all of one slot:
--   K  the lock's name itself: who holds. While it is held exclusively, owner ':' token \n session \n label (a value that nobody
--      else has, as in the common recipe, so that its clients and fencelock exclude each other), and at the end the byte 1 if
--      somebody may wait for it; 'fencelock:shared' or 'fencelock:permit:N' otherwise
--   Q  waiters, a sorted set by time of arrival in µs
--   X  tombstones: owners whose claims were given up and must not come to life by a late message; a sorted set by time in ms
--   and beside Q, under names that differ from its name in one letter:
--   W  records of waiters, and of those who hold together: a hash by owner
--   D  ends of the leases of those who hold together, in µs: a sorted set by owner
-- and at the end T, the newest token of all locks that share it. A token is a time in µs, that of the grant, or later.
-- ARGV: claim window ms, life of T ms, life of Q, W and X ms; 1 in quarantine (see takeover.lua): nothing is granted to new
--   owners, except by the release of one who holds alone; how inboxes are named on a cluster (s: or p: and what is appended;
--   empty elsewhere); then per group:
--   operation, count, ttl ms, what is noted of the owners (\n session \n label), then each owner
--   (for n, r and x the owner is followed by ':' token \n if that is known: then only this hold is meant, and no other one of
--   the same owner)
-- Operations; a and t are followed by the mode (e, s, p) and, unless both are 0, ':' permits ':' time of arrival:
--   a acquire or wait; also a waiter's look at its place (idempotent)   t acquire or leave it
--   r release   x release for good: leaves a tombstone   n renew   v evict all holders
-- Reply: server time in µs if that mattered, 0 otherwise; then per operation one of
--   token held for the ttl          {2, arrival, look again in ms, 1 if a foreigner holds and this is the first} waiting
--   {3} busy                        {4, 1 freed | 2 withdrawn | 0 nothing}     {5, 1 | 0} renewed or gone
--   {6, n} in use with n permits    {7} its owner has given it up              {8, count} evicted
--   {9} quarantine
--   and, short for the common cases, 4 for {4, 1} and 5 for {5, 1}
-- Invariants: K decides who holds; D and the holders in W mean nothing without it. Nobody is granted a lock past a living
-- waiter. A granted waiter holds for the claim window, until it looks or renews.
--
-- The common case, locks that nobody else is at, is handled a group at a time in the loop at the end; the rest, one by one, by
-- what set_up makes when it is needed.

local call, format, find, byte = redis.call, string.format, string.find, string.byte
local T = KEYS[#KEYS]

local now, now_text
local function tell_time()
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
  now_text = format('%.0f', now)
end

-- Takes a new token, also as text: for one lock, or for locks that differ. An error later in the batch must not make it come
-- twice, so it is noted before it is used.
local newest
local function mint()
  local text
  if newest then
    newest = newest + 1
  else
    if not now then tell_time() end
    newest, text = now, now_text
    local old = tonumber(call('SET', T, now_text, 'PX', ARGV[2], 'GET') or 0) or 0
    if old < now then return newest, text end
    newest = old + 1
  end
  text = format('%.0f', newest)
  call('SET', T, text, 'PX', ARGV[2])
  return newest, text
end

local function set_up()
  if not now then tell_time() end
  local match = string.match
  local window, linger, kept = tonumber(ARGV[1]), ARGV[3], tonumber(ARGV[2])
  local quarantined = ARGV[4] == '1'
  local SHARED, PERMIT = 'fencelock:shared', 'fencelock:permit:'
  local recheck = 5000

  local function str(number) return format('%.0f', number) end

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
    local owner, token, session = match(cur or '', '^(%x+):(%d+)\n(%x+)\n')
    if owner and #owner == 32 then return owner, token, session end
  end

  -- Writes down that an owner holds, for `lease` ms.
  local function hold(cur, K, Q, W, D, owner, mode, of, lease, token, note)
    if mode == 'e' then
      local waited_for = call('EXISTS', Q) == 1 and '\1' or ''
      call('SET', K, owner .. ':' .. token .. note .. waited_for, 'PX', lease)
      return
    end
    if not cur then call('DEL', D) end
    call('SET', K, mode == 's' and SHARED or PERMIT .. of, 'KEEPTTL')
    call('ZADD', D, str(now + lease * 1000), owner)
    call('HSET', W, owner, 'h\n' .. token .. '\n' .. mode .. '\n' .. of .. note)
    prolong(K, W, D)
  end

  -- On a cluster, messages of sharded channels stay on this node.
  local how, suffix = match(ARGV[5], '^(%a)(.*)$')
  local function send(session, word)
    return call(how == 's' and 'SPUBLISH' or 'PUBLISH', 'fencelock:inbox:' .. session .. (suffix or ''), word)
  end

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
  local function settle(K, Q, W, D, moved, surely_free)
    if quarantined and not surely_free then return end
    while true do
      local owner = call('ZRANGE', Q, 0, 0)[1]
      if not owner then return end
      local mode, of, ttl, note, session =
        match(call('HGET', W, owner) or '', '^w\n(%a)\n(%d+)\n(%d+)\n%d+(\n(%x+)\n.*)$')
      -- Without a record it was forgotten; without a listener its process is gone, or about to reconnect, and then it takes
      -- its place by its time of arrival.
      local here = 0
      if mode then
        local cur = current(K, W, D)
        if admits(cur, D, mode, of) then
          local lease = math.min(window, tonumber(ttl))
          local _, token = mint()
          here = send(session, 'g\n' .. owner .. '\n' .. token .. '\n' .. now_text .. '\n' .. lease .. '\n' .. K)
          if here > 0 then
            call('ZREM', Q, owner)
            call('HDEL', W, owner)
            hold(cur, K, Q, W, D, owner, mode, of, lease, token, note)
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
  local function held(cur, K, W, D, owner, mode, of, ttl, note)
    local alone, token = owner_of(cur)
    if alone == owner then
      call('PEXPIRE', K, ttl)
      return tonumber(token)
    end
    if together(cur) and call('ZSCORE', D, owner) then
      call('PEXPIRE', K, ttl)
      token = tonumber(match(call('HGET', W, owner) or '', '^h\n(%d+)'))
      if not token then
        token = mint()
        call('HSET', W, owner, 'h\n' .. str(token) .. '\n' .. mode .. '\n' .. of .. note)
      end
      call('ZADD', D, str(now + ttl * 1000), owner)
      prolong(K, W, D)
      return token
    end
  end

  local function acquire(K, Q, W, D, X, op, mode, of, arrival, owner, ttl, note)
    if call('ZSCORE', X, owner) then return {7} end
    local token = held(current(K, W, D), K, W, D, owner, mode, of, ttl, note)
    if token then return token end
    if quarantined then return op == 't' and call('EXISTS', K) == 1 and {3} or {9} end
    if mode == 'p' then
      local known = other_permits(call('GET', K), Q, W, of)
      if known then return {6, known} end
    end
    local place = call('ZSCORE', Q, owner)
    settle(K, Q, W, D, false)
    local cur = call('GET', K)
    if place then
      -- It may have been this one's turn; or its record was evicted, and it takes its place anew.
      token = held(cur, K, W, D, owner, mode, of, ttl, note)
      if token then return token end
      place = call('ZSCORE', Q, owner)
    end
    if call('EXISTS', Q) == 0 and admits(cur, D, mode, of) then
      local text
      token, text = mint()
      hold(cur, K, Q, W, D, owner, mode, of, tonumber(ttl), text, note)
      return token
    end
    if op == 't' then return {3} end
    if not place then
      local last = call('ZRANGE', Q, -1, -1, 'WITHSCORES')[2]
      place = arrival ~= '0' and arrival or str(math.max(now, last and tonumber(last) + 1 or 0))
      call('ZADD', Q, place, owner)
      call('HSET', W, owner, 'w\n' .. mode .. '\n' .. of .. '\n' .. ttl .. '\n' .. now_text .. note)
      if owner_of(cur) and byte(cur, -1) ~= 1 then call('APPEND', K, '\1') end
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
  local function remove(K, Q, W, D, owner, token)
    local cur = call('GET', K)
    local alone, known = owner_of(cur)
    local surely_free = false
    if alone == owner and (token == '' or token == known) then
      call('DEL', K)
      surely_free = true
    elseif together(cur) and is_hold(W, owner, token) and call('ZREM', D, owner) == 1 then
      call('HDEL', W, owner)
      if call('ZCARD', D) == 0 then call('DEL', K) else prolong(K, W, D) end
    else
      local first = call('ZRANGE', Q, 0, 0)[1] == owner
      if token ~= '' or call('ZREM', Q, owner) == 0 then return 0 end
      call('HDEL', W, owner)
      if first then settle(K, Q, W, D, true) end
      return 2
    end
    settle(K, Q, W, D, true, surely_free)
    return 1
  end

  local function release(K, Q, W, D, X, op, owner, token)
    local found = remove(K, Q, W, D, owner, token)
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
    local cur = call('GET', K)
    local alone, known = owner_of(cur)
    if alone == owner and (token == '' or token == known) then
      if call('PTTL', K) < tonumber(ttl) then call('PEXPIRE', K, ttl) end
      return 5
    end
    local over = together(cur) and is_hold(W, owner, token) and call('ZSCORE', D, owner)
    if not over or tonumber(over) <= now then return {5, 0} end
    -- First, as above.
    call('PEXPIRE', K, ttl)
    call('ZADD', D, str(math.max(tonumber(over), now + ttl * 1000)), owner)
    prolong(K, W, D)
    return {5, 1}
  end

  local function evict(K, Q, W, D)
    local cur = current(K, W, D)
    local count = 0
    if together(cur) then
      for _, owner in ipairs(call('ZRANGE', D, 0, -1)) do
        local session = match(call('HGET', W, owner) or '', '^h\n%d+\n%a\n%d+\n(%x+)')
        if session then send(session, 'l\n' .. owner) end
        call('HDEL', W, owner)
        count = count + 1
      end
    elseif cur then
      local owner, _, session = owner_of(cur)
      if owner then send(session, 'l\n' .. owner) end
      count = 1
    end
    call('DEL', K, D)
    settle(K, Q, W, D, true)
    return {8, count}
  end

  return function(K, Q, X, op, who, ttl, note)
    local W = string.gsub(Q, '^(fencelock:%d)q', '%1w')
    local D = string.gsub(Q, '^(fencelock:%d)q', '%1d')
    local owner, token = match(who, '^(%x+):?(%d*)\n?$')
    if op == 'r' or op == 'x' then return release(K, Q, W, D, X, op, owner, token) end
    if op == 'n' then return renew(K, W, D, owner, token, ttl) end
    if op == 'v' then return evict(K, Q, W, D) end
    local what, mode, of, arrival = match(op, '^(%a)(%a):?(%d*):?(%d*)$')
    if of == '' then of, arrival = '0', '0' end
    return acquire(K, Q, W, D, X, what, mode, of, arrival, owner, ttl, note)
  end
end

local replies = {0}
local slow

-- A group at a time: its first key, its first owner, how many operations it has.
local key, at = 1, 6
while at <= #ARGV do
  local op, count, ttl, note = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], ARGV[at + 3]
  at = at + 4
  local last = key + count - 1
  local free, token, token_text, values
  local all_ours = op == 'r'
  if (op == 'ae' or op == 'te') and ARGV[4] == '0' then
    free = call('EXISTS', unpack(KEYS, key, key + 3 * count - 1)) == 0
  elseif op == 'r' or op == 'n' then
    values = call('MGET', unpack(KEYS, key, last))
    for index = 1, count do
      local value = values[index]
      local ours = value and find(value, ARGV[at + index - 1], 1, true) == 1
      values[index] = ours and (op == 'n' or byte(value, -1) ~= 1)
      all_ours = all_ours and values[index]
    end
    if all_ours then call('DEL', unpack(KEYS, key, last)) end
    if op == 'n' then call('PEXPIRE', T, ARGV[2]) end
  end
  for index = 0, count - 1 do
    local K, reply = KEYS[key + index], nil
    if all_ours then
      reply = 4
    elseif values then
      if op == 'n' and values[index + 1] then
        if call('PTTL', K) < tonumber(ttl) then call('PEXPIRE', K, ttl) end
        reply = 5
      end
    elseif free or free == false and call('EXISTS', K, KEYS[key + count + index], KEYS[key + 2 * count + index]) == 0 then
      if not token then
        token, token_text = mint()
        token_text = ':' .. token_text .. note
      end
      -- The same lock may be in the group twice.
      if call('SET', K, ARGV[at + index] .. token_text, 'PX', ttl, 'NX') then reply = token end
    end
    if not reply then
      slow = slow or set_up()
      reply = slow(K, KEYS[key + count + index], KEYS[key + 2 * count + index], op, ARGV[at + index], ttl, note)
    end
    replies[#replies + 1] = reply
  end
  key = key + (values and 2 or 3) * count
  at = at + count
end
replies[1] = now_text or 0
return replies
