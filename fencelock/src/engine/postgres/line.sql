-- What happens to lines: functions for PostgreSQL. Running this again replaces them by themselves.
--
-- fencelock.act carries out a batch of operations, in one statement and so in one transaction; the rest is its parts.
--
-- Invariants
--   * Whoever changes the claims of a line has locked the line's row; only a renewal, which touches nothing but its own claim,
--     has not. Each statement sees what was committed before it began (READ COMMITTED is demanded), so a line that is
--     locked is seen as it is.
--   * Operations come in the order of their names: batches cannot block each other for ever.
--   * Nobody is granted a lock past a living waiter.
--   * A granted waiter holds for the claim window, until it looks or renews.
--   * A token is greater than all that the name had: max(newest + 1, now).

-- The number of these functions. Clients that need a higher one replace them; those that know only lower ones go away.
CREATE OR REPLACE FUNCTION fencelock.version() RETURNS integer LANGUAGE sql IMMUTABLE AS 'SELECT 1';

-- The key of a name for pg_advisory_xact_lock, for locks inside of a transaction of one's own:
--   SELECT pg_advisory_xact_lock(fencelock.advisory_key('invoice:42'));
-- These exclude each other. They do not exclude holders of a lease.
CREATE OR REPLACE FUNCTION fencelock.advisory_key(name text) RETURNS bigint LANGUAGE sql IMMUTABLE STRICT AS $$
  SELECT ('x' || encode(substr(sha256(convert_to('fencelock:' || name, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint
$$;

CREATE OR REPLACE FUNCTION fencelock.now() RETURNS bigint LANGUAGE sql VOLATILE AS $$
  SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint
$$;

-- Whether a client is there: it listens, which shows in a lock that its connection holds; or it has asked for words lately.
-- The caller is there, and would not find its own lock.
CREATE OR REPLACE FUNCTION fencelock.alive(caller bytea, client bytea, asks boolean, moment bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  IF client = caller THEN
    RETURN true;
  ELSIF asks THEN
    RETURN EXISTS (SELECT FROM fencelock.session WHERE id = client AND seen > moment - 3000000);
  ELSE
    RETURN NOT pg_try_advisory_xact_lock(('x' || encode(substr(client, 1, 8), 'hex'))::bit(64)::bigint);
  END IF;
END $$;

-- Sends a word to a client; it arrives when the transaction is committed, and only then.
--   g owner token time lease-in-ms name   granted          h owner ms name   first in line, should look after so long
--   l owner                               taken away       (name and owner in hexadecimal digits)
CREATE OR REPLACE FUNCTION fencelock.tell(client bytea, asks boolean, moment bigint, what text) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  IF asks THEN
    INSERT INTO fencelock.word (session, at, word) VALUES (client, moment, what);
  ELSE
    PERFORM pg_notify('fencelock_' || encode(client, 'hex'), what);
  END IF;
END $$;

-- Locks the row of a line; makes one if that is wanted. Tells whether there is one, and whether it is new.
CREATE OR REPLACE FUNCTION fencelock.enter(line_name bytea, make boolean, OUT there boolean, OUT made boolean)
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  made := false;
  LOOP
    PERFORM FROM fencelock.line WHERE name = line_name FOR UPDATE;
    there := FOUND;
    IF there OR NOT make THEN
      RETURN;
    END IF;
    INSERT INTO fencelock.line (name, token, used)
      VALUES (line_name, coalesce((SELECT token FROM fencelock.mark WHERE single), 0), fencelock.now()) ON CONFLICT DO NOTHING;
    made := FOUND;
  END LOOP;
END $$;

-- Takes a new token for a grant.
CREATE OR REPLACE FUNCTION fencelock.mint(line_name bytea, moment bigint) RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  minted bigint;
BEGIN
  UPDATE fencelock.line SET token = greatest(token + 1, moment),
      used = CASE WHEN used < moment - 300000000 THEN moment ELSE used END
    WHERE name = line_name RETURNING token INTO minted;
  RETURN minted;
END $$;

-- The line rule; the twin of `admits` in rule.rs. Everybody who is written down as a holder counts: a lease may seem to be over
-- while its renewal is about to be committed.
CREATE OR REPLACE FUNCTION fencelock.admits(line_name bytea, wanted text, wanted_permits bigint) RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  held record;
BEGIN
  SELECT mode, permits INTO held FROM fencelock.claim WHERE name = line_name AND holds LIMIT 1;
  IF NOT FOUND THEN
    RETURN true;
  ELSIF wanted = 's' THEN
    RETURN held.mode = 's';
  ELSIF wanted = 'p' THEN
    RETURN held.mode = 'p' AND held.permits = wanted_permits
      AND (SELECT count(*) FROM fencelock.claim WHERE name = line_name AND holds) < wanted_permits;
  END IF;
  RETURN false;
END $$;

-- In how many ms the first in line should look for itself if nobody tells it anything: when a lease ends that makes room, and
-- every now and then, since a word can get lost.
CREATE OR REPLACE FUNCTION fencelock.first_look(line_name bytea, moment bigint) RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  until bigint;
BEGIN
  SELECT CASE WHEN min(mode) = 'p' THEN min(ends) ELSE max(ends) END INTO until
    FROM fencelock.claim WHERE name = line_name AND holds AND ends > moment;
  RETURN least((coalesce(until, moment) - moment) / 1000 + 2, 5000);
END $$;

-- Forgets those whose leases are over.
CREATE OR REPLACE FUNCTION fencelock.expire(line_name bytea, moment bigint) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  -- The cheap question first. A renewal may be under way, without the line's lock: the deletion waits for it, and asks again.
  IF EXISTS (SELECT FROM fencelock.claim WHERE name = line_name AND holds AND ends <= moment) THEN
    DELETE FROM fencelock.claim WHERE name = line_name AND holds AND ends <= moment AND owner IN
      (SELECT owner FROM fencelock.claim WHERE name = line_name AND holds AND ends <= moment ORDER BY ends LIMIT 64);
  END IF;
END $$;

-- Hands over to the waiters that the rule lets hold, skipping those whose client is not there; then, if the line has moved, tells
-- the one that is first now when to look.
CREATE OR REPLACE FUNCTION fencelock.settle(caller bytea, line_name bytea, moment bigint, moved boolean) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  first fencelock.claim;
  here  boolean;
  grant_token bigint;
  lease bigint;
BEGIN
  PERFORM fencelock.expire(line_name, moment);
  LOOP
    SELECT * INTO first FROM fencelock.claim WHERE name = line_name AND NOT holds ORDER BY place LIMIT 1;
    IF NOT FOUND THEN
      RETURN;
    END IF;
    IF fencelock.admits(line_name, first.mode, first.permits) THEN
      here := fencelock.alive(caller, first.session, first.polls, moment);
      IF here THEN
        grant_token := fencelock.mint(line_name, moment);
        lease := least(900, first.ttl);
        UPDATE fencelock.claim SET holds = true, token = grant_token, since = moment, ends = moment + lease * 1000
          WHERE name = line_name AND owner = first.owner;
        PERFORM fencelock.tell(first.session, first.polls, moment, concat_ws(' ', 'g', encode(first.owner, 'hex'),
          grant_token, moment, lease, encode(line_name, 'hex')));
      END IF;
    ELSE
      IF NOT moved THEN
        RETURN;
      END IF;
      here := fencelock.alive(caller, first.session, first.polls, moment);
      IF here THEN
        PERFORM fencelock.tell(first.session, first.polls, moment, concat_ws(' ', 'h', encode(first.owner, 'hex'),
          fencelock.first_look(line_name, moment), encode(line_name, 'hex')));
        RETURN;
      END IF;
    END IF;
    IF NOT here THEN
      DELETE FROM fencelock.claim WHERE name = line_name AND owner = first.owner;
    END IF;
    moved := true;
  END LOOP;
END $$;

-- Extends the hold of an owner, never shortens it; its token, or null if it does not hold.
CREATE OR REPLACE FUNCTION fencelock.held(line_name bytea, claim_owner bytea, moment bigint, claim_ttl bigint) RETURNS bigint
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  known bigint;
BEGIN
  UPDATE fencelock.claim SET ends = greatest(ends, moment + claim_ttl * 1000)
    WHERE name = line_name AND owner = claim_owner AND holds AND ends > moment RETURNING token INTO known;
  RETURN known;
END $$;

-- Acquires, waits (a), or leaves it (t). Also a waiter's look at its place.
CREATE OR REPLACE FUNCTION fencelock.acquire(caller bytea, asks boolean, code text, line_name bytea, claim_owner bytea,
  claim_ttl bigint, wanted text, wanted_permits bigint, arrival bigint, claim_label bytea, OUT kind integer, OUT a bigint, OUT b bigint)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  moment   bigint := fencelock.now();
  known    bigint;
  mine     fencelock.claim;
  my_place bigint;
  ahead    bigint;
  in_company boolean;
BEGIN
  IF EXISTS (SELECT FROM fencelock.gone WHERE name = line_name AND owner = claim_owner) THEN
    kind := 7;
    RETURN;
  END IF;
  kind := 1;
  -- The common case: nobody is there.
  IF NOT EXISTS (SELECT FROM fencelock.claim WHERE name = line_name) THEN
    a := fencelock.mint(line_name, moment);
    INSERT INTO fencelock.claim VALUES (line_name, claim_owner, true, moment, caller, asks, wanted, wanted_permits, claim_ttl, a,
      moment + claim_ttl * 1000, moment, claim_label);
    RETURN;
  END IF;
  PERFORM fencelock.expire(line_name, moment);
  a := fencelock.held(line_name, claim_owner, moment, claim_ttl);
  IF a IS NOT NULL THEN
    RETURN;
  END IF;
  IF wanted = 'p' THEN
    SELECT permits INTO known FROM fencelock.claim WHERE name = line_name AND holds AND mode = 'p' LIMIT 1;
    IF NOT FOUND THEN
      SELECT permits INTO known FROM (SELECT * FROM fencelock.claim WHERE name = line_name AND NOT holds
        ORDER BY place DESC LIMIT 1) last WHERE mode = 'p';
    END IF;
    IF known <> wanted_permits THEN
      kind := 6;
      a := known;
      RETURN;
    END IF;
  END IF;
  SELECT * INTO mine FROM fencelock.claim WHERE name = line_name AND owner = claim_owner;
  IF mine.holds THEN
    -- Its lease is over, and there were too many of that kind to forget them all.
    DELETE FROM fencelock.claim WHERE name = line_name AND owner = claim_owner;
  ELSE
    my_place := mine.place;
    IF code = 'a' AND mine.session <> caller THEN
      UPDATE fencelock.claim SET session = caller, polls = asks WHERE name = line_name AND owner = claim_owner;
    END IF;
  END IF;
  PERFORM fencelock.settle(caller, line_name, moment, false);
  IF my_place IS NOT NULL THEN
    a := fencelock.held(line_name, claim_owner, moment, claim_ttl);
    IF a IS NOT NULL THEN
      RETURN;
    END IF;
  ELSIF NOT EXISTS (SELECT FROM fencelock.claim WHERE name = line_name AND NOT holds)
    AND fencelock.admits(line_name, wanted, wanted_permits) THEN
    a := fencelock.mint(line_name, moment);
    INSERT INTO fencelock.claim VALUES (line_name, claim_owner, true, moment, caller, asks, wanted, wanted_permits, claim_ttl, a,
      moment + claim_ttl * 1000, moment, claim_label);
    RETURN;
  END IF;
  a := NULL;
  IF code = 't' THEN
    kind := 3;
    RETURN;
  END IF;
  IF my_place IS NULL THEN
    my_place := CASE WHEN arrival > 0 THEN arrival
      ELSE greatest(moment, (SELECT max(place) + 1 FROM fencelock.claim WHERE name = line_name AND NOT holds)) END;
    INSERT INTO fencelock.claim VALUES (line_name, claim_owner, false, my_place, caller, asks, wanted, wanted_permits, claim_ttl,
      0, 0, moment, claim_label);
  END IF;
  kind := 2;
  a := my_place;
  -- Those ahead may be dead and a lease may end without a word: then the first who lives looks first, and a moment later the
  -- next ones do. Who has one of its own client ahead looks seldom: that one does it.
  SELECT count(*), coalesce(bool_or(session = caller), false) INTO ahead, in_company
    FROM (SELECT session FROM fencelock.claim WHERE name = line_name AND NOT holds AND place < my_place ORDER BY place DESC LIMIT 30) x;
  b := CASE WHEN in_company THEN 15000 ELSE least(fencelock.first_look(line_name, moment) + 30 * ahead, 5000) END;
END $$;

-- Takes an owner out, wherever it stands: 1 held, 2 waited, 0 neither. With a token, only the hold that has it. For good (x): leaves
-- a tombstone.
CREATE OR REPLACE FUNCTION fencelock.release(caller bytea, code text, line_name bytea, claim_owner bytea, claim_token bigint)
RETURNS integer LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  moment bigint := fencelock.now();
  was    fencelock.claim;
  result integer := 0;
BEGIN
  DELETE FROM fencelock.claim WHERE name = line_name AND owner = claim_owner AND (claim_token = 0 OR token = claim_token)
    RETURNING * INTO was;
  IF FOUND THEN
    result := CASE WHEN NOT was.holds THEN 2 WHEN was.ends > moment THEN 1 ELSE 0 END;
    IF EXISTS (SELECT FROM fencelock.claim WHERE name = line_name AND NOT holds) AND (was.holds
      OR NOT EXISTS (SELECT FROM fencelock.claim WHERE name = line_name AND NOT holds AND place < was.place)) THEN
      PERFORM fencelock.settle(caller, line_name, moment, true);
    END IF;
  END IF;
  IF code = 'x' THEN
    INSERT INTO fencelock.gone VALUES (line_name, claim_owner, moment) ON CONFLICT (name, owner) DO UPDATE SET at = moment;
  END IF;
  RETURN result;
END $$;

-- Takes the lock away from all who hold it with a token up to this one, and hands over. Tells how many there were. Sent again, it must not
-- take the lock from those who hold by now.
CREATE OR REPLACE FUNCTION fencelock.evict(caller bytea, line_name bytea, newest bigint) RETURNS bigint LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  moment bigint := fencelock.now();
  holder fencelock.claim;
  taken  bigint := 0;
BEGIN
  FOR holder IN DELETE FROM fencelock.claim WHERE name = line_name AND holds AND token <= newest RETURNING * LOOP
    IF holder.ends > moment THEN
      PERFORM fencelock.tell(holder.session, holder.polls, moment, 'l ' || encode(holder.owner, 'hex'));
      taken := taken + 1;
    END IF;
  END LOOP;
  PERFORM fencelock.settle(caller, line_name, moment, true);
  RETURN taken;
END $$;

-- Forgets what nobody needs any more, a few rows at a time; skips what somebody works on. A line that is forgotten raises the mark.
CREATE OR REPLACE FUNCTION fencelock.sweep(caller bytea) RETURNS void LANGUAGE plpgsql VOLATILE AS $$
DECLARE
  moment bigint := fencelock.now();
  old    fencelock.line;
  waiter fencelock.claim;
  lives  boolean;
BEGIN
  FOR old IN SELECT * FROM fencelock.line WHERE used < moment - 600000000 ORDER BY used LIMIT 4 FOR UPDATE SKIP LOCKED LOOP
    PERFORM fencelock.expire(old.name, moment);
    lives := false;
    FOR waiter IN SELECT * FROM fencelock.claim WHERE name = old.name AND NOT holds ORDER BY place LIMIT 64 LOOP
      lives := fencelock.alive(caller, waiter.session, waiter.polls, moment);
      EXIT WHEN lives;
      DELETE FROM fencelock.claim WHERE name = old.name AND owner = waiter.owner;
    END LOOP;
    IF lives OR EXISTS (SELECT FROM fencelock.claim WHERE name = old.name AND holds AND ends > moment) THEN
      -- In use.
      UPDATE fencelock.line SET used = moment WHERE name = old.name;
    ELSIF NOT EXISTS (SELECT FROM fencelock.claim WHERE name = old.name) THEN
      DELETE FROM fencelock.line WHERE name = old.name;
      UPDATE fencelock.mark SET token = old.token WHERE single AND token < old.token;
    END IF;
  END LOOP;
  DELETE FROM fencelock.gone WHERE (name, owner) IN
    (SELECT name, owner FROM fencelock.gone WHERE at < moment - 60000000 ORDER BY at LIMIT 16 FOR UPDATE SKIP LOCKED);
  DELETE FROM fencelock.word WHERE (session, number) IN
    (SELECT session, number FROM fencelock.word WHERE at < moment - 60000000 ORDER BY at LIMIT 16 FOR UPDATE SKIP LOCKED);
  DELETE FROM fencelock.session WHERE id IN
    (SELECT id FROM fencelock.session WHERE seen < moment - 600000000 ORDER BY seen LIMIT 4 FOR UPDATE SKIP LOCKED);
END $$;

-- Carries out a batch of operations, which come in the order of their names (by their bytes).
--   caller, asks     the client's session, and whether it asks for its words instead of listening
--   codes            a acquire or wait, also a waiter's look at its place (idempotent)   t acquire or leave it
--                    r release   x release for good: leaves a tombstone   n renew   v evict all holders up to a token
--   names, owners, ttls (ms), modes (e, s, p), permits, labels: of the claim
--   arrivals         when a waiter came, if it has been in line before; otherwise 0
--   tokens           of r, x and n: of the hold that is meant; 0 if that is not known; of v: of the newest hold that is meant
-- Reply: one row with the server's time (0, now, null), then one per operation (kind, a, b):
--   1 token          held for the ttl          2 arrival, look again in ms   waiting         3 busy
--   4 1 freed | 2 withdrawn | 0 nothing        5 1 | 0   renewed or gone                     6 n  in use with n permits
--   7 its owner has given it up                8 count   evicted
CREATE OR REPLACE FUNCTION fencelock.act(caller bytea, asks boolean, codes text[], names bytea[], owners bytea[], ttls bigint[],
  modes text[], permits bigint[], arrivals bigint[], tokens bigint[], labels bytea[])
RETURNS TABLE (kind integer, a bigint, b bigint) LANGUAGE plpgsql VOLATILE
-- Plans are made while the tables are small, and serve when they are large.
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan SET jit = off AS $$
#variable_conflict use_variable
DECLARE
  moment bigint;
  there  boolean;
  made   boolean;
  untidy boolean := false;
  waits  boolean := false;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    RAISE EXCEPTION 'fencelock works in READ COMMITTED transactions' USING ERRCODE = 'FL001';
  END IF;
  kind := 0; a := fencelock.now(); b := NULL;
  RETURN NEXT;
  FOR i IN 1 .. cardinality(codes) LOOP
    IF codes[i] = 'n' THEN
      moment := fencelock.now();
      UPDATE fencelock.claim AS c SET ends = greatest(c.ends, moment + ttls[i] * 1000)
        WHERE c.name = names[i] AND c.owner = owners[i] AND c.holds AND c.ends > moment AND (tokens[i] = 0 OR c.token = tokens[i]);
      kind := 5; a := CASE WHEN FOUND THEN 1 ELSE 0 END; b := NULL;
    ELSE
      SELECT e.there, e.made INTO there, made FROM fencelock.enter(names[i], codes[i] IN ('a', 't', 'x')) e;
      untidy := untidy OR made OR codes[i] = 'x';
      IF codes[i] IN ('a', 't') THEN
        SELECT r.kind, r.a, r.b INTO kind, a, b FROM fencelock.acquire(caller, asks, codes[i], names[i], owners[i], ttls[i], modes[i],
          permits[i], arrivals[i], labels[i]) r;
        waits := waits OR kind = 2;
      ELSIF codes[i] = 'v' THEN
        kind := 8; a := CASE WHEN there THEN fencelock.evict(caller, names[i], tokens[i]) ELSE 0 END; b := NULL;
      ELSE
        kind := 4; a := CASE WHEN there THEN fencelock.release(caller, codes[i], names[i], owners[i], tokens[i]) ELSE 0 END; b := NULL;
      END IF;
    END IF;
    RETURN NEXT;
  END LOOP;
  -- At the end: what others may want as well is locked last.
  IF untidy THEN
    PERFORM fencelock.sweep(caller);
  END IF;
  IF waits AND asks THEN
    INSERT INTO fencelock.session VALUES (caller, fencelock.now()) ON CONFLICT (id) DO UPDATE SET seen = excluded.seen;
  END IF;
END $$;

-- The words for a client that asks for them, the oldest first; each is given once. With touch, the client is seen to be there.
CREATE OR REPLACE FUNCTION fencelock.hear(caller bytea, touch boolean) RETURNS SETOF text LANGUAGE plpgsql VOLATILE AS $$
BEGIN
  IF touch THEN
    INSERT INTO fencelock.session VALUES (caller, fencelock.now()) ON CONFLICT (id) DO UPDATE SET seen = excluded.seen;
  END IF;
  RETURN QUERY WITH taken AS (DELETE FROM fencelock.word WHERE session = caller RETURNING number, word)
    SELECT word FROM taken ORDER BY number;
END $$;
