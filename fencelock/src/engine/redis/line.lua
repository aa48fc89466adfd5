-- Carries out a batch of operations on lines. All that changes a lock happens in here, atomically.
--
-- Operations of the same kind, lifetime and note travel as a group.
-- KEYS: the K of all operations, all of one slot; on a cluster one that is never there, so that nothing is done while the slot is
--   on its way from one node to another and neither has all of the keys; and T:
--   K  the lock's name itself: who holds. While it is held exclusively, owner ':' token \n session \n label (a value that nobody
--      else has, as in the common recipe, so that its clients and fencelock exclude each other), and at the end the byte 1 if
--      somebody may wait for it; 'fencelock:shared' or 'fencelock:permit:N' otherwise
--   T  the newest token of all locks that share it: 'fencelock:t', and on a cluster a tag that moves it to the slot of K. A token
--      is a time in µs, that of the grant, or later.
-- and beside them, named after K and the tag of T:
--   Q  waiters, a sorted set by time of arrival in µs
--   W  records of waiters, and of those who hold together: a hash by owner
--   D  ends of the leases of those who hold together, in µs: a sorted set by owner
--   X  tombstones, of all locks that share T: owners whose claims were given up and must not come to life by a late message, each
--      followed by K; a sorted set by time in ms. It is there also if there is a Q.
-- ARGV: life of T in ms; 1 in quarantine (see takeover.lua: nothing is granted to new owners, except by the first release of
--   one who holds alone), 0 otherwise, and on a cluster behind it how inboxes are named (s: or p: and what is appended); then per group:
--   operation, count; for a, t and n also ttl in ms and what is noted of the owners (\n session \n label); then each owner
--   (for n, r, R and x the owner is followed by ':' token \n if that is known: then only this hold is meant, and no other one of
--   the same owner; for v by that of the newest hold that is meant, 0 for a foreigner)
-- Operations; a and t are followed by the mode (e, s, p) and, unless both are 0, ':' permits ':' time of arrival:
--   a acquire or wait; also a waiter's look at its place (idempotent)   t acquire or leave it
--   r release   R the same when it does not prove that nobody else holds: others may hold together with this one, or an earlier
--   attempt was carried out, perhaps by the predecessor of this server
--   x release for good: leaves a tombstone   n renew   v evict all holders up to a token
-- Reply: server time in µs if that mattered, 0 otherwise; then per group its number if all its replies are that number, and else
--   all of them:
--   token held for the ttl          {2, arrival, look again in ms, 1 if a foreigner holds and this is the first} waiting
--   {3} busy                        {4, 1 freed | 2 withdrawn | 0 nothing}     {5, 1 | 0} renewed or gone
--   {6, n} in use with n permits    {7} its owner has given it up              {8, count} evicted
--   {9} quarantine
--   and, short for the common cases, 4 for {4, 1} and 5 for {5, 1}
-- Invariants: K decides who holds; D and the holders in W mean nothing without it. Nobody is granted a lock past a living
-- waiter. A granted waiter holds for the claim window, until it looks or renews.
--
-- The common case, locks that nobody else is at, is handled a group at a time in the loop at the end; the rest, one by one, by
-- what set_up makes when it is needed. Functions take no local variable from outside: that would cost every call something.

local call = redis.call
local T = KEYS[#KEYS]
local now, newest

-- One operation that travels alone, on a lock that nobody else is at: in the fewest steps, since somebody waits for just this.
if #KEYS == 2 and ARGV[4] == '1' then
  local K = KEYS[1]
  if ARGV[3] == 'r' then
    local value = call('GET', K)
    if value and string.find(value, ARGV[5], 1, true) == 1 and string.byte(value, -1) ~= 1 then
      call('DEL', K)
      return {0, 4}
    end
  elseif ARGV[3] == 'ae' and ARGV[2] == '0' and call('EXISTS', 'fencelock:x') == 0 then
    local time = call('TIME')
    now = time[1] * 1000000 + time[2]
    local text = string.format('%.0f', now)
    newest = tonumber(call('SET', T, text, 'PX', ARGV[1], 'GET') or 0)
    if newest and newest < now and call('SET', K, ARGV[7] .. ':' .. text .. ARGV[6], 'PX', ARGV[5], 'NX') then
      return {text, now}
    end
    -- The clock went back; or the lock is taken.
    newest = newest or 0
    if newest >= now then call('SET', T, string.format('%.0f', newest), 'PX', ARGV[1]) else newest = now end
  end
end

-- Takes a new token, also as text: for one lock, or for locks that differ. An error later in the batch must not make it come
-- twice, so it is noted before it is used. `newest` is the one taken before by this call, if any.
local function mint(T, now, newest)
  local call, format = redis.call, string.format
  if not newest then
    local text = format('%.0f', now)
    local old = tonumber(call('SET', T, text, 'PX', ARGV[1], 'GET') or 0) or 0
    if old < now then return now, text end
    newest = old
  end
  local text = format('%.0f', newest + 1)
  call('SET', T, text, 'PX', ARGV[1])
  return newest + 1, text
end

-- Returns what carries out an operation, and what takes another token.
local function set_up(T, X, tag, now, newest)
  local call, format, match, byte = redis.call, string.format, string.match, string.byte
  local now_text = format('%.0f', now)
  -- How long a granted waiter has to react before the next one is asked; how long the records of waiters, and tombstones, outlive
  -- the last sign of life; how long those of holders outlive their leases. In ms.
  local window, linger, kept = 900, 60000, tonumber(ARGV[1])
  local quarantined = byte(ARGV[2]) == 49
  local SHARED, PERMIT = 'fencelock:shared', 'fencelock:permit:'
  local recheck = 5000

  local function str(number) return format('%.0f', number) end

  local function take()
    local text
    newest, text = mint(T, now, newest)
    return newest, text
  end

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
  local how, suffix = match(ARGV[2], '^%d(%a)(.*)$')
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
          local _, token = take()
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
        token = take()
        call('HSET', W, owner, 'h\n' .. str(token) .. '\n' .. mode .. '\n' .. of .. note)
      end
      call('ZADD', D, str(now + ttl * 1000), owner)
      prolong(K, W, D)
      return token
    end
  end

  local function acquire(K, Q, W, D, op, mode, of, arrival, owner, ttl, note)
    if call('ZSCORE', X, owner .. K) then return {7} end
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
      token, text = take()
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
    call('ZADD', X, 0, '')
    call('ZREMRANGEBYSCORE', X, '(0', str(math.floor(now / 1000) - linger))
    call('PEXPIRE', X, linger)
    if call('PTTL', W) < linger then call('PEXPIRE', W, linger) end
    local again, foreign = look(cur, K, Q, D, owner)
    return {2, str(tonumber(place)), again, foreign}
  end

  -- Whether the hold of an owner together with others is the one with this token, if one is given.
  local function is_hold(W, owner, token)
    local known = match(call('HGET', W, owner) or '', '^h\n(%d+)')
    return not known or token == '' or token == known
  end

  -- Takes an owner out, wherever it stands: 1 held, 2 waited, 0 neither. With a token, only the hold that has it. `first_time`: nobody
  -- else can have been granted the lock because of an earlier attempt.
  local function remove(K, Q, W, D, owner, token, first_time)
    local cur = call('GET', K)
    local alone, known = owner_of(cur)
    local surely_free = false
    if alone == owner and (token == '' or token == known) then
      call('DEL', K)
      surely_free = first_time
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

  local function release(K, Q, W, D, op, owner, token)
    local found = remove(K, Q, W, D, owner, token, op == 'r')
    if op == 'x' then
      -- At the end: a server without memory refuses it, but not after something was removed.
      local ms = math.floor(now / 1000)
      call('ZADD', X, str(ms), owner .. K)
      call('ZREMRANGEBYSCORE', X, '(0', str(ms - linger))
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

  -- Sent again, it must not take the lock from those who hold by now: up to which token is what somebody has seen. A foreigner has no
  -- token, and is meant by 0.
  local function evict(K, Q, W, D, newest)
    local cur = current(K, W, D)
    local count = 0
    if together(cur) then
      for _, owner in ipairs(call('ZRANGE', D, 0, -1)) do
        local token, session = match(call('HGET', W, owner) or '', '^h\n(%d+)\n%a\n%d+\n(%x+)')
        if not token or tonumber(token) <= newest then
          if session then send(session, 'l\n' .. owner) end
          call('HDEL', W, owner)
          call('ZREM', D, owner)
          count = count + 1
        end
      end
      if call('ZCARD', D) > 0 then
        prolong(K, W, D)
      else
        call('DEL', K)
        -- Also one of whom nothing was left but K.
        if count == 0 then count = 1 end
      end
    elseif cur then
      local owner, token, session = owner_of(cur)
      if owner and tonumber(token) <= newest or not owner and newest == 0 then
        if owner then send(session, 'l\n' .. owner) end
        call('DEL', K, D)
        count = 1
      end
    end
    settle(K, Q, W, D, true)
    return {8, count}
  end

  local function carry_out(K, op, who, ttl, note)
    local Q, W, D = 'fencelock:q:' .. tag .. K, 'fencelock:w:' .. tag .. K, 'fencelock:d:' .. tag .. K
    local owner, token = match(who, '^(%x+):?(%d*)\n?$')
    if op == 'r' or op == 'R' or op == 'x' then return release(K, Q, W, D, op, owner, token) end
    if op == 'n' then return renew(K, W, D, owner, token, ttl) end
    if op == 'v' then return evict(K, Q, W, D, tonumber(token)) end
    local what, mode, of, arrival = match(op, '^(%a)(%a):?(%d*):?(%d*)$')
    if of == '' then of, arrival = '0', '0' end
    return acquire(K, Q, W, D, what, mode, of, arrival, owner, ttl, note)
  end
  return carry_out, take
end

local tag = string.sub(T, 12)
local X = 'fencelock:x' .. tag
local carry_out, take

local function tell_time()
  local time = redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

-- A group at a time: its first key, its first owner.
local replies = {0}
local key, at = 1, 3
while ARGV[at] do
  local op, count, ttl, note = ARGV[at], tonumber(ARGV[at + 1]), nil, nil
  at = at + 2
  if op ~= 'r' and op ~= 'R' and op ~= 'x' and op ~= 'v' then
    ttl, note = ARGV[at], ARGV[at + 1]
    at = at + 2
  end
  -- The replies to those that are done, how many they are, and the number that all of them are.
  local done, many, reply = {}, 0, nil
  if op == 'r' or op == 'n' then
    local find, byte = string.find, string.byte
    reply = op == 'r' and 4 or 5
    local values = call('MGET', unpack(KEYS, key, key + count - 1))
    local free = {}
    for index = 1, count do
      local value, K = values[index], KEYS[key + index - 1]
      if value and find(value, ARGV[at + index - 1], 1, true) == 1 and (op == 'n' or byte(value, -1) ~= 1) then
        done[index], many = reply, many + 1
        if op == 'r' then
          free[many] = K
        elseif call('PTTL', K) < tonumber(ttl) then
          call('PEXPIRE', K, ttl)
        end
      end
    end
    if many > 0 and op == 'r' then call('DEL', unpack(free)) end
    if op == 'n' then call('PEXPIRE', T, ARGV[1]) end
  elseif (op == 'ae' or op == 'te') and string.byte(ARGV[2]) == 48 then
    now = now or tell_time()
    local dead
    if call('EXISTS', X) == 1 then
      local owners = {}
      for index = 1, count do owners[index] = ARGV[at + index - 1] .. KEYS[key + index - 1] end
      dead = call('ZMSCORE', X, unpack(owners))
    end
    local text
    for index = 1, count do
      local K = KEYS[key + index - 1]
      if not dead or not dead[index] and call('EXISTS', K, 'fencelock:q:' .. tag .. K) == 0 then
        if not text then
          if take then reply, text = take() else newest, text = mint(T, now, newest) end
          reply = reply or newest
          text = ':' .. text .. note
        end
        if call('SET', K, ARGV[at + index - 1] .. text, 'PX', ttl, 'NX') then done[index], many = reply, many + 1 end
      end
    end
  end
  if many < count then
    now = now or tell_time()
    if not carry_out then carry_out, take = set_up(T, X, tag, now, newest) end
    for index = 1, count do
      done[index] = done[index] or carry_out(KEYS[key + index - 1], op, ARGV[at + index - 1], ttl, note)
    end
    reply = done
  end
  replies[#replies + 1] = reply
  key = key + count
  at = at + count
end
if now then replies[1] = string.format('%.0f', now) end
return replies
