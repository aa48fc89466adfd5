-- What fencelock keeps in PostgreSQL (12 or newer): all of it in a schema of its own. Running this again changes nothing.
--
-- Times are microseconds since 1970 by the server's clock. Names and labels are bytes: any name is a good one. An owner is 16
-- bytes, a session as well.
CREATE SCHEMA IF NOT EXISTS fencelock;

-- One row per name in use. Whoever changes a line locks its row first; a batch does so in the order of the names.
--   token  the newest token of this name
--   used   when it was last used, give or take five minutes
CREATE TABLE IF NOT EXISTS fencelock.line (
  name  bytea  PRIMARY KEY,
  token bigint NOT NULL,
  used  bigint NOT NULL
) WITH (fillfactor = 50);
CREATE INDEX IF NOT EXISTS line_used ON fencelock.line (used);

-- One row: the greatest token among the lines that were forgotten. A line that is made again goes on from there, so a token never
-- comes twice, whatever the clock does.
CREATE TABLE IF NOT EXISTS fencelock.mark (
  single boolean PRIMARY KEY DEFAULT true CHECK (single),
  token  bigint  NOT NULL
);
INSERT INTO fencelock.mark (token) VALUES (0) ON CONFLICT DO NOTHING;

-- The claims of a line: those who hold and those who wait.
--   place    when it came; decides on the order
--   session  the client, to which words are sent; polls: it asks for them, instead of listening
--   mode     e, s or p; permits: of p
--   ttl      in ms
--   token, ends, since: of the grant; while it waits 0, 0, and when it came
CREATE TABLE IF NOT EXISTS fencelock.claim (
  name    bytea    NOT NULL,
  owner   bytea    NOT NULL,
  holds   boolean  NOT NULL,
  place   bigint   NOT NULL,
  session bytea    NOT NULL,
  polls   boolean  NOT NULL,
  mode    text     NOT NULL,
  permits bigint   NOT NULL,
  ttl     bigint   NOT NULL,
  token   bigint   NOT NULL,
  ends    bigint   NOT NULL,
  since   bigint   NOT NULL,
  label   bytea    NOT NULL,
  PRIMARY KEY (name, owner)
);
CREATE INDEX IF NOT EXISTS claim_waits ON fencelock.claim (name, place) WHERE NOT holds;
CREATE INDEX IF NOT EXISTS claim_holds ON fencelock.claim (name, ends) WHERE holds;

-- Owners whose claims were given up, and must not come to life by a message that arrives late.
CREATE TABLE IF NOT EXISTS fencelock.gone (
  name  bytea  NOT NULL,
  owner bytea  NOT NULL,
  at    bigint NOT NULL,
  PRIMARY KEY (name, owner)
);
CREATE INDEX IF NOT EXISTS gone_at ON fencelock.gone (at);

-- Clients that ask for their words (notify=off), and when each was last heard of.
CREATE TABLE IF NOT EXISTS fencelock.session (
  id   bytea  PRIMARY KEY,
  seen bigint NOT NULL
);
CREATE INDEX IF NOT EXISTS session_seen ON fencelock.session (seen);

-- Their words.
CREATE TABLE IF NOT EXISTS fencelock.word (
  session bytea  NOT NULL,
  number  bigint NOT NULL GENERATED ALWAYS AS IDENTITY,
  at      bigint NOT NULL,
  word    text   NOT NULL,
  PRIMARY KEY (session, number)
);
CREATE INDEX IF NOT EXISTS word_at ON fencelock.word (at);
