-- What fencelock keeps in MySQL (8.0 or newer) or MariaDB (10.6 or newer): tables and procedures whose names start with fencelock_, in
-- the database of the URL. Running this again changes nothing.
--
-- Times are microseconds since 1970 by the server's clock. Names and labels are bytes: any name is a good one, and case matters. An
-- owner is 16 bytes, a session as well.

-- One row per name in use. Whoever changes a line locks its row first; a batch does so in the order of the names.
--   token  the newest token of this name
--   used   when it was last used, give or take five minutes
CREATE TABLE IF NOT EXISTS fencelock_line (
  name  VARBINARY(512) NOT NULL PRIMARY KEY,
  token BIGINT         NOT NULL,
  used  BIGINT         NOT NULL,
  KEY fencelock_line_used (used)
) ENGINE = InnoDB;

-- One row: the greatest token among the lines that were forgotten, from which a line that is made again goes on; and the version of
-- the procedures, written last.
CREATE TABLE IF NOT EXISTS fencelock_mark (
  single  TINYINT NOT NULL PRIMARY KEY,
  token   BIGINT  NOT NULL,
  version INT     NOT NULL
) ENGINE = InnoDB;

-- The claims of a line: those who hold and those who wait.
--   place    when it came; decides on the order
--   session  the client, to which words are sent
--   mode     e, s or p; permits: of p
--   ttl      in ms
--   token, ends, since: of the grant; while it waits 0, 0, and when it came
CREATE TABLE IF NOT EXISTS fencelock_claim (
  name    VARBINARY(512) NOT NULL,
  owner   BINARY(16)     NOT NULL,
  holds   TINYINT        NOT NULL,
  place   BIGINT         NOT NULL,
  session BINARY(16)     NOT NULL,
  mode    BINARY(1)      NOT NULL,
  permits BIGINT         NOT NULL,
  ttl     BIGINT         NOT NULL,
  token   BIGINT         NOT NULL,
  ends    BIGINT         NOT NULL,
  since   BIGINT         NOT NULL,
  label   VARBINARY(255) NOT NULL,
  PRIMARY KEY (name, owner),
  KEY fencelock_claim_waits (name, holds, place),
  KEY fencelock_claim_holds (name, holds, ends)
) ENGINE = InnoDB;

-- Owners whose claims were given up, and must not come to life by a message that arrives late.
CREATE TABLE IF NOT EXISTS fencelock_gone (
  name  VARBINARY(512) NOT NULL,
  owner BINARY(16)     NOT NULL,
  at    BIGINT         NOT NULL,
  PRIMARY KEY (name, owner),
  KEY fencelock_gone_at (at)
) ENGINE = InnoDB;

-- Words for clients, until they ask for them.
CREATE TABLE IF NOT EXISTS fencelock_word (
  number  BIGINT          NOT NULL AUTO_INCREMENT PRIMARY KEY,
  session BINARY(16)      NOT NULL,
  at      BIGINT          NOT NULL,
  word    VARBINARY(1200) NOT NULL,
  KEY fencelock_word_session (session, number),
  KEY fencelock_word_at (at)
) ENGINE = InnoDB;
