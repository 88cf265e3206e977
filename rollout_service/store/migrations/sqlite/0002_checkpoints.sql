-- Points to go back to: ends are numbered over the whole run, a checkpoint remembers how many there were.

ALTER TABLE run ADD COLUMN ends INTEGER NOT NULL DEFAULT 0 CHECK (ends >= 0);

ALTER TABLE groups ADD COLUMN end_number INTEGER
    CHECK (end_number IS NULL OR (end_number >= 1 AND state IN ('acked', 'stale', 'dropped', 'failed')));

-- Groups that ended before there were numbers get theirs in the order they ended.
UPDATE groups SET end_number = numbered.n FROM (
    SELECT seq, row_number() OVER (ORDER BY changed_at, seq) AS n FROM groups
    WHERE state IN ('acked', 'stale', 'dropped', 'failed')
) AS numbered WHERE groups.seq = numbered.seq;

UPDATE run SET ends = (SELECT coalesce(max(end_number), 0) FROM groups);

CREATE UNIQUE INDEX groups_by_end ON groups (end_number) WHERE end_number IS NOT NULL;

CREATE TABLE checkpoints (
    name           TEXT    NOT NULL PRIMARY KEY,
    number         INTEGER NOT NULL UNIQUE CHECK (number >= 1),
    policy_version INTEGER NOT NULL CHECK (policy_version >= 0),
    ends           INTEGER NOT NULL CHECK (ends >= 0),
    created_at     REAL    NOT NULL
) STRICT;

CREATE TRIGGER checkpoints_stand BEFORE UPDATE ON checkpoints
BEGIN
    SELECT RAISE(ABORT, 'a checkpoint is never moved');
END;
