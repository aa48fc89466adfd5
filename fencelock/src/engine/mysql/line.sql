-- What happens to lines: procedures for MySQL and MariaDB. They are the twins of the functions in ../postgres/line.sql.
--
-- fencelock_act carries out a batch of operations in one transaction; the rest is its parts.
--
-- Invariants
--   * Whoever changes the claims of a line has locked the line's row; only a renewal, which touches nothing but its own claim,
--     has not. Transactions are READ COMMITTED, so a line that is locked is seen as it is.
--   * Operations come in the order of their names: batches cannot block each other for ever.
--   * Nobody is granted a lock past a living waiter.
--   * A granted waiter holds for the claim window, until it looks or renews.
--   * A token is greater than all that the name had: max(newest + 1, now).
DELIMITER //

-- Locks the row of a line; makes one if that is wanted. Tells whether there is one, and whether it is new.
DROP PROCEDURE IF EXISTS fencelock_enter
//
CREATE PROCEDURE fencelock_enter(IN line_name VARBINARY(512), IN make BOOLEAN, OUT there BOOLEAN, OUT made BOOLEAN)
SQL SECURITY INVOKER
BEGIN
  DECLARE known BIGINT DEFAULT NULL;
  DECLARE marked BIGINT DEFAULT 0;
  SET made = FALSE;
  SELECT token INTO known FROM fencelock_line WHERE name = line_name FOR UPDATE;
  IF known IS NULL AND make THEN
    -- The mark as it is now: a line of this name may just have been forgotten.
    SELECT token INTO marked FROM fencelock_mark WHERE single = 1;
    INSERT INTO fencelock_line (name, token, used)
      VALUES (line_name, marked, TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)))
      ON DUPLICATE KEY UPDATE used = used;
    SET made = TRUE, known = 0;
  END IF;
  SET there = known IS NOT NULL;
END
//

-- Takes a new token for a grant.
DROP PROCEDURE IF EXISTS fencelock_mint
//
CREATE PROCEDURE fencelock_mint(IN line_name VARBINARY(512), IN moment BIGINT, OUT minted BIGINT)
SQL SECURITY INVOKER
BEGIN
  UPDATE fencelock_line SET token = GREATEST(token + 1, moment), used = IF(used < moment - 300000000, moment, used)
    WHERE name = line_name;
  SELECT token INTO minted FROM fencelock_line WHERE name = line_name;
END
//

-- The line rule; the twin of `admits` in rule.rs. Everybody who is written down as a holder counts: a lease may seem to be over
-- while its renewal is about to be committed.
DROP PROCEDURE IF EXISTS fencelock_admits
//
CREATE PROCEDURE fencelock_admits(IN line_name VARBINARY(512), IN wanted BINARY(1), IN wanted_permits BIGINT, OUT admitted BOOLEAN)
SQL SECURITY INVOKER
BEGIN
  DECLARE held_mode BINARY(1) DEFAULT NULL;
  DECLARE held_permits BIGINT DEFAULT 0;
  SELECT mode, permits INTO held_mode, held_permits FROM fencelock_claim WHERE name = line_name AND holds = 1 LIMIT 1;
  IF held_mode IS NULL THEN
    SET admitted = TRUE;
  ELSEIF wanted = 's' THEN
    SET admitted = held_mode = 's';
  ELSEIF wanted = 'p' THEN
    SET admitted = held_mode = 'p' AND held_permits = wanted_permits
      AND (SELECT COUNT(*) FROM fencelock_claim WHERE name = line_name AND holds = 1) < wanted_permits;
  ELSE
    SET admitted = FALSE;
  END IF;
END
//

-- In how many ms the first in line should look for itself if nobody tells it anything: when a lease ends that makes room, and
-- every now and then, since a word can get lost.
DROP PROCEDURE IF EXISTS fencelock_first_look
//
CREATE PROCEDURE fencelock_first_look(IN line_name VARBINARY(512), IN moment BIGINT, OUT look BIGINT)
SQL SECURITY INVOKER
BEGIN
  DECLARE until BIGINT DEFAULT NULL;
  SELECT IF(MIN(mode) = 'p', MIN(ends), MAX(ends)) INTO until
    FROM fencelock_claim WHERE name = line_name AND holds = 1 AND ends > moment;
  SET look = LEAST((COALESCE(until, moment) - moment) DIV 1000 + 2, 5000);
END
//

-- Forgets those whose leases are over. A renewal may be under way, without the line's lock: the deletion waits for it, and looks again.
DROP PROCEDURE IF EXISTS fencelock_expire
//
CREATE PROCEDURE fencelock_expire(IN line_name VARBINARY(512), IN moment BIGINT)
SQL SECURITY INVOKER
BEGIN
  IF EXISTS (SELECT 1 FROM fencelock_claim WHERE name = line_name AND holds = 1 AND ends <= moment) THEN
    DELETE FROM fencelock_claim WHERE name = line_name AND holds = 1 AND ends <= moment ORDER BY ends LIMIT 64;
  END IF;
END
//

-- Whether a client is there: its listening connection holds a lock of its name. The caller is there.
DROP PROCEDURE IF EXISTS fencelock_alive
//
CREATE PROCEDURE fencelock_alive(IN caller BINARY(16), IN client BINARY(16), OUT here BOOLEAN)
SQL SECURITY INVOKER
BEGIN
  SET here = client = caller OR IS_USED_LOCK(CONCAT('fencelock:', HEX(client))) IS NOT NULL;
END
//

-- Sends a word to a client, which finds it when the transaction is committed. What the caller is told goes along with the reply.
DROP PROCEDURE IF EXISTS fencelock_tell
//
CREATE PROCEDURE fencelock_tell(IN caller BINARY(16), IN client BINARY(16), IN moment BIGINT, IN what VARBINARY(1200))
SQL SECURITY INVOKER
BEGIN
  IF client = caller THEN
    SET @fencelock_words = CONCAT(@fencelock_words, what, ';');
  ELSE
    INSERT INTO fencelock_word (session, at, word) VALUES (client, moment, what);
  END IF;
END
//

-- Hands over to the waiters that the rule lets hold, skipping those whose client is not there; then, if the line has moved, tells
-- the one that is first now when to look. The words are those of ../postgres/line.sql.
DROP PROCEDURE IF EXISTS fencelock_settle
//
CREATE PROCEDURE fencelock_settle(IN caller BINARY(16), IN line_name VARBINARY(512), IN moment BIGINT, IN moved BOOLEAN)
SQL SECURITY INVOKER
BEGIN
  DECLARE first_owner, first_session BINARY(16);
  DECLARE first_mode BINARY(1);
  DECLARE first_permits, first_ttl, minted, lease, look BIGINT;
  DECLARE admitted, here BOOLEAN;
  CALL fencelock_expire(line_name, moment);
  settling: LOOP
    SET first_owner = NULL;
    SELECT owner, session, mode, permits, ttl INTO first_owner, first_session, first_mode, first_permits, first_ttl
      FROM fencelock_claim WHERE name = line_name AND holds = 0 ORDER BY place LIMIT 1;
    IF first_owner IS NULL THEN
      LEAVE settling;
    END IF;
    CALL fencelock_admits(line_name, first_mode, first_permits, admitted);
    IF NOT admitted AND NOT moved THEN
      LEAVE settling;
    END IF;
    CALL fencelock_alive(caller, first_session, here);
    IF NOT here THEN
      DELETE FROM fencelock_claim WHERE name = line_name AND owner = first_owner;
    ELSEIF admitted THEN
      CALL fencelock_mint(line_name, moment, minted);
      SET lease = LEAST(900, first_ttl);
      UPDATE fencelock_claim SET holds = 1, token = minted, since = moment, ends = moment + lease * 1000
        WHERE name = line_name AND owner = first_owner;
      CALL fencelock_tell(caller, first_session, moment,
        CONCAT_WS(' ', 'g', HEX(first_owner), minted, moment, lease, HEX(line_name)));
    ELSE
      CALL fencelock_first_look(line_name, moment, look);
      CALL fencelock_tell(caller, first_session, moment, CONCAT_WS(' ', 'h', HEX(first_owner), look, HEX(line_name)));
      LEAVE settling;
    END IF;
    SET moved = TRUE;
  END LOOP;
END
//

-- Extends the hold of an owner, never shortens it; its token, or null if it does not hold.
DROP PROCEDURE IF EXISTS fencelock_held
//
CREATE PROCEDURE fencelock_held(IN line_name VARBINARY(512), IN claim_owner BINARY(16), IN moment BIGINT, IN claim_ttl BIGINT, OUT known BIGINT)
SQL SECURITY INVOKER
BEGIN
  SET known = NULL;
  SELECT token INTO known FROM fencelock_claim
    WHERE name = line_name AND owner = claim_owner AND holds = 1 AND ends > moment FOR UPDATE;
  IF known IS NOT NULL THEN
    UPDATE fencelock_claim SET ends = GREATEST(ends, moment + claim_ttl * 1000) WHERE name = line_name AND owner = claim_owner;
  END IF;
END
//

-- Acquires, waits (a), or leaves it (t). Also a waiter's look at its place.
DROP PROCEDURE IF EXISTS fencelock_acquire
//
CREATE PROCEDURE fencelock_acquire(IN caller BINARY(16), IN code BINARY(1), IN line_name VARBINARY(512), IN claim_owner BINARY(16),
  IN claim_ttl BIGINT, IN wanted BINARY(1), IN wanted_permits BIGINT, IN arrival BIGINT, IN claim_label VARBINARY(255),
  OUT kind INT, OUT a BIGINT, OUT b BIGINT)
SQL SECURITY INVOKER
acquiring: BEGIN
  DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));
  DECLARE known, my_place, look BIGINT DEFAULT NULL;
  DECLARE my_session BINARY(16) DEFAULT NULL;
  DECLARE my_holds, admitted BOOLEAN DEFAULT NULL;
  SET kind = 1, a = NULL, b = NULL;
  IF EXISTS (SELECT 1 FROM fencelock_gone WHERE name = line_name AND owner = claim_owner) THEN
    SET kind = 7;
    LEAVE acquiring;
  END IF;
  -- The common case: nobody is there.
  IF NOT EXISTS (SELECT 1 FROM fencelock_claim WHERE name = line_name) THEN
    CALL fencelock_mint(line_name, moment, a);
    INSERT INTO fencelock_claim VALUES (line_name, claim_owner, 1, moment, caller, wanted, wanted_permits, claim_ttl, a,
      moment + claim_ttl * 1000, moment, claim_label);
    LEAVE acquiring;
  END IF;
  CALL fencelock_expire(line_name, moment);
  CALL fencelock_held(line_name, claim_owner, moment, claim_ttl, a);
  IF a IS NOT NULL THEN
    LEAVE acquiring;
  END IF;
  IF wanted = 'p' THEN
    SELECT permits INTO known FROM fencelock_claim WHERE name = line_name AND holds = 1 AND mode = 'p' LIMIT 1;
    IF known IS NULL THEN
      SELECT IF(mode = 'p', permits, NULL) INTO known FROM fencelock_claim WHERE name = line_name AND holds = 0
        ORDER BY place DESC LIMIT 1;
    END IF;
    IF known <> wanted_permits THEN
      SET kind = 6, a = known;
      LEAVE acquiring;
    END IF;
  END IF;
  SELECT holds, place, session INTO my_holds, my_place, my_session FROM fencelock_claim
    WHERE name = line_name AND owner = claim_owner;
  IF my_holds THEN
    -- Its lease is over, and there were too many of that kind to forget them all.
    DELETE FROM fencelock_claim WHERE name = line_name AND owner = claim_owner;
    SET my_place = NULL;
  ELSEIF code = 'a' AND my_session <> caller THEN
    UPDATE fencelock_claim SET session = caller WHERE name = line_name AND owner = claim_owner;
  END IF;
  CALL fencelock_settle(caller, line_name, moment, FALSE);
  IF my_place IS NOT NULL THEN
    CALL fencelock_held(line_name, claim_owner, moment, claim_ttl, a);
    IF a IS NOT NULL THEN
      LEAVE acquiring;
    END IF;
  ELSEIF NOT EXISTS (SELECT 1 FROM fencelock_claim WHERE name = line_name AND holds = 0) THEN
    CALL fencelock_admits(line_name, wanted, wanted_permits, admitted);
    IF admitted THEN
      CALL fencelock_mint(line_name, moment, a);
      INSERT INTO fencelock_claim VALUES (line_name, claim_owner, 1, moment, caller, wanted, wanted_permits, claim_ttl, a,
        moment + claim_ttl * 1000, moment, claim_label);
      LEAVE acquiring;
    END IF;
  END IF;
  IF code = 't' THEN
    SET kind = 3;
    LEAVE acquiring;
  END IF;
  IF my_place IS NULL THEN
    SELECT IF(arrival > 0, arrival, GREATEST(moment, COALESCE(MAX(place) + 1, 0))) INTO my_place
      FROM fencelock_claim WHERE name = line_name AND holds = 0;
    INSERT INTO fencelock_claim VALUES (line_name, claim_owner, 0, my_place, caller, wanted, wanted_permits, claim_ttl,
      0, 0, moment, claim_label);
  END IF;
  -- Those ahead may be dead and a lease may end without a word: then the first who lives looks first, and a moment later the
  -- next ones do. Who has one of its own client ahead looks seldom: that one does it.
  CALL fencelock_first_look(line_name, moment, look);
  SELECT IF(COALESCE(SUM(session = caller), 0) > 0, 15000, LEAST(look + 30 * COUNT(*), 5000)) INTO look FROM
    (SELECT session FROM fencelock_claim WHERE name = line_name AND holds = 0 AND place < my_place ORDER BY place DESC LIMIT 30) AS ahead;
  SET kind = 2, a = my_place, b = look;
END
//

-- Takes an owner out, wherever it stands: 1 held, 2 waited, 0 neither. With a token, only the hold that has it. For good (x): leaves
-- a tombstone.
DROP PROCEDURE IF EXISTS fencelock_release
//
CREATE PROCEDURE fencelock_release(IN caller BINARY(16), IN code BINARY(1), IN line_name VARBINARY(512), IN claim_owner BINARY(16),
  IN claim_token BIGINT, OUT found INT)
SQL SECURITY INVOKER
BEGIN
  DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));
  DECLARE was_holding BOOLEAN DEFAULT NULL;
  DECLARE was_place, was_ends BIGINT;
  SET found = 0;
  SELECT holds, place, ends INTO was_holding, was_place, was_ends FROM fencelock_claim
    WHERE name = line_name AND owner = claim_owner AND (claim_token = 0 OR token = claim_token) FOR UPDATE;
  IF was_holding IS NOT NULL THEN
    DELETE FROM fencelock_claim WHERE name = line_name AND owner = claim_owner;
    SET found = IF(NOT was_holding, 2, was_ends > moment);
    IF EXISTS (SELECT 1 FROM fencelock_claim WHERE name = line_name AND holds = 0) AND (was_holding
      OR NOT EXISTS (SELECT 1 FROM fencelock_claim WHERE name = line_name AND holds = 0 AND place < was_place)) THEN
      CALL fencelock_settle(caller, line_name, moment, TRUE);
    END IF;
  END IF;
  IF code = 'x' THEN
    INSERT INTO fencelock_gone VALUES (line_name, claim_owner, moment) ON DUPLICATE KEY UPDATE at = moment;
  END IF;
END
//

-- Takes the lock away from all who hold it with a token up to this one, and hands over. Tells how many there were. Sent again, it must not
-- take the lock from those who hold by now.
DROP PROCEDURE IF EXISTS fencelock_evict
//
CREATE PROCEDURE fencelock_evict(IN caller BINARY(16), IN line_name VARBINARY(512), IN newest BIGINT, OUT taken BIGINT)
SQL SECURITY INVOKER
BEGIN
  DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));
  CALL fencelock_expire(line_name, moment);
  INSERT INTO fencelock_word (session, at, word)
    SELECT session, moment, CONCAT('l ', HEX(owner)) FROM fencelock_claim
    WHERE name = line_name AND holds = 1 AND token <= newest;
  SET taken = ROW_COUNT();
  DELETE FROM fencelock_claim WHERE name = line_name AND holds = 1 AND token <= newest;
  CALL fencelock_settle(caller, line_name, moment, TRUE);
END
//

-- Forgets what nobody needs any more, a few rows at a time. A line that is forgotten raises the mark. Runs last in a transaction, and
-- looks at one line only, since it cannot skip what somebody works on.
DROP PROCEDURE IF EXISTS fencelock_sweep
//
CREATE PROCEDURE fencelock_sweep(IN caller BINARY(16))
SQL SECURITY INVOKER
BEGIN
  DECLARE moment BIGINT DEFAULT TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));
  DECLARE old_name VARBINARY(512);
  DECLARE old_token BIGINT;
  DECLARE rest INT DEFAULT 4;
  DECLARE dead INT;
  DECLARE waiter, its_session BINARY(16);
  DECLARE here BOOLEAN;
  lines_: WHILE rest > 0 DO
    SET rest = rest - 1, old_name = NULL, here = FALSE, dead = 0;
    SELECT name, token INTO old_name, old_token FROM fencelock_line WHERE used < moment - 600000000
      ORDER BY used LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF old_name IS NULL THEN
      LEAVE lines_;
    END IF;
    CALL fencelock_expire(old_name, moment);
    waiters: WHILE dead < 64 DO
      SET waiter = NULL, dead = dead + 1;
      SELECT owner, session INTO waiter, its_session FROM fencelock_claim WHERE name = old_name AND holds = 0 ORDER BY place LIMIT 1;
      IF waiter IS NULL THEN
        LEAVE waiters;
      END IF;
      CALL fencelock_alive(caller, its_session, here);
      IF here THEN
        LEAVE waiters;
      END IF;
      DELETE FROM fencelock_claim WHERE name = old_name AND owner = waiter;
    END WHILE;
    IF here OR EXISTS (SELECT 1 FROM fencelock_claim WHERE name = old_name AND holds = 1) THEN
      UPDATE fencelock_line SET used = moment WHERE name = old_name;
    ELSEIF NOT EXISTS (SELECT 1 FROM fencelock_claim WHERE name = old_name) THEN
      DELETE FROM fencelock_line WHERE name = old_name;
      UPDATE fencelock_mark SET token = GREATEST(token, old_token) WHERE single = 1;
    END IF;
  END WHILE;
  DELETE FROM fencelock_gone WHERE at < moment - 60000000 ORDER BY at LIMIT 16;
  DELETE FROM fencelock_word WHERE at < moment - 60000000 ORDER BY at LIMIT 16;
END
//

-- Carries out a batch of operations, which come in the order of their names (by their bytes).
--   caller  the client's session
--   ops     for each operation: code name owner ttl mode permits arrival token label ';'
--           code            a acquire or wait, also a waiter's look at its place (idempotent)   t acquire or leave it
--                           r release   x release for good: leaves a tombstone   n renew   v evict all holders up to a token
--           name, owner, label in hexadecimal digits; ttl in ms; mode e, s or p
--           arrival         when a waiter came, if it has been in line before; otherwise 0
--           token           of r, x and n: of the hold that is meant; 0 if that is not known; of v: of the newest hold that is meant
-- Reply: one text: the server's time ';', then for each operation kind a b ';' where b may be missing, then '|' and the words for the
-- caller, each with ';':
--   1 token          held for the ttl          2 arrival, look again in ms   waiting         3 busy
--   4 1 freed | 2 withdrawn | 0 nothing        5 1 | 0   renewed or gone                     6 n  in use with n permits
--   7 its owner has given it up                8 count   evicted
DROP PROCEDURE IF EXISTS fencelock_act
//
CREATE PROCEDURE fencelock_act(IN caller BINARY(16), IN ops LONGBLOB)
SQL SECURITY INVOKER
BEGIN
  DECLARE at, next_at INT DEFAULT 1;
  DECLARE op VARBINARY(2048);
  DECLARE code, wanted BINARY(1);
  DECLARE line_name VARBINARY(512);
  DECLARE claim_owner BINARY(16);
  DECLARE claim_ttl, wanted_permits, arrival, claim_token, a, b, moment BIGINT;
  DECLARE claim_label VARBINARY(255);
  DECLARE kind INT;
  DECLARE there, made, untidy BOOLEAN DEFAULT FALSE;
  DECLARE reply LONGBLOB DEFAULT CONCAT(TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6)), ';');
  DECLARE EXIT HANDLER FOR SQLEXCEPTION
  BEGIN
    ROLLBACK;
    RESIGNAL;
  END;
  SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
  START TRANSACTION;
  SET @fencelock_words = '';
  SET next_at = LOCATE(';', ops, at);
  WHILE next_at > 0 DO
    SET op = SUBSTRING(ops, at, next_at - at);
    SET code = SUBSTRING_INDEX(op, ' ', 1),
        line_name = UNHEX(SUBSTRING_INDEX(SUBSTRING_INDEX(op, ' ', 2), ' ', -1)),
        claim_owner = UNHEX(SUBSTRING_INDEX(SUBSTRING_INDEX(op, ' ', 3), ' ', -1)),
        claim_ttl = SUBSTRING_INDEX(SUBSTRING_INDEX(op, ' ', 4), ' ', -1),
        wanted = SUBSTRING_INDEX(SUBSTRING_INDEX(op, ' ', 5), ' ', -1),
        wanted_permits = SUBSTRING_INDEX(SUBSTRING_INDEX(op, ' ', 6), ' ', -1),
        arrival = SUBSTRING_INDEX(SUBSTRING_INDEX(op, ' ', 7), ' ', -1),
        claim_token = SUBSTRING_INDEX(SUBSTRING_INDEX(op, ' ', 8), ' ', -1),
        claim_label = UNHEX(SUBSTRING_INDEX(op, ' ', -1)),
        b = NULL;
    IF code = 'n' THEN
      SET moment = TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(6));
      UPDATE fencelock_claim SET ends = GREATEST(ends + 1, moment + claim_ttl * 1000)
        WHERE name = line_name AND owner = claim_owner AND holds = 1 AND ends > moment AND (claim_token = 0 OR token = claim_token);
      SET kind = 5, a = ROW_COUNT() > 0;
    ELSE
      CALL fencelock_enter(line_name, code IN ('a', 't', 'x'), there, made);
      SET untidy = untidy OR made OR code = 'x';
      IF code IN ('a', 't') THEN
        CALL fencelock_acquire(caller, code, line_name, claim_owner, claim_ttl, wanted, wanted_permits, arrival, claim_label, kind, a, b);
      ELSEIF code = 'v' THEN
        SET kind = 8, a = 0;
        IF there THEN
          CALL fencelock_evict(caller, line_name, claim_token, a);
        END IF;
      ELSE
        SET kind = 4, a = 0;
        IF there THEN
          CALL fencelock_release(caller, code, line_name, claim_owner, claim_token, a);
        END IF;
      END IF;
    END IF;
    SET reply = CONCAT(reply, CONCAT_WS(' ', kind, a, b), ';');
    SET at = next_at + 1;
    SET next_at = LOCATE(';', ops, at);
  END WHILE;
  -- At the end: what others may want as well is locked last.
  IF untidy THEN
    CALL fencelock_sweep(caller);
  END IF;
  COMMIT;
  SELECT CONCAT(reply, '|', @fencelock_words);
END
//

DELIMITER ;

INSERT INTO fencelock_mark (single, token, version) VALUES (1, 0, 1) ON DUPLICATE KEY UPDATE version = 1;
