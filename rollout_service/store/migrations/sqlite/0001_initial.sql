-- The schema refuses what the life of a group does not allow: a row that breaks a rule of the core cannot be committed.
-- Letters of groups.rows: w waiting or in flight, f finished, x failed, - used up by an earlier attempt.

CREATE TABLE run (
    id                  INTEGER PRIMARY KEY CHECK (id = 1),
    policy_version      INTEGER NOT NULL CHECK (policy_version >= 0),
    paused              INTEGER NOT NULL CHECK (paused IN (0, 1)),
    final               INTEGER NOT NULL CHECK (final IN (0, 1)),
    last_seq            INTEGER NOT NULL CHECK (last_seq >= 0),
    read_position       INTEGER NOT NULL CHECK (read_position >= 0),
    prompts_fingerprint TEXT    NOT NULL,
    acked               INTEGER NOT NULL CHECK (acked >= 0),
    stale               INTEGER NOT NULL CHECK (stale >= 0),
    dropped             INTEGER NOT NULL CHECK (dropped >= 0),
    failed              INTEGER NOT NULL CHECK (failed >= 0),
    CHECK (acked + stale + dropped + failed <= last_seq)
) STRICT;

INSERT INTO run VALUES (1, 0, 0, 0, 0, 0, '', 0, 0, 0, 0);

-- Leases are never removed: a request_id is remembered for ever, and a late ack finds its lease.
CREATE TABLE leases (
    lease_id       TEXT    NOT NULL PRIMARY KEY,
    request_id     TEXT    UNIQUE,
    consumer       TEXT,
    max_groups     INTEGER NOT NULL CHECK (max_groups >= 1),
    min_groups     INTEGER NOT NULL CHECK (min_groups BETWEEN 0 AND max_groups),
    lease_s        INTEGER NOT NULL CHECK (lease_s >= 1),
    policy_version INTEGER NOT NULL CHECK (policy_version >= 0),
    created_at     REAL    NOT NULL,
    expires_at     REAL    NOT NULL,
    state          TEXT    NOT NULL CHECK (state IN ('live', 'ended', 'void'))
) STRICT;

CREATE INDEX leases_live ON leases (created_at) WHERE state = 'live';

CREATE TABLE groups (
    seq             INTEGER PRIMARY KEY CHECK (seq > 0),
    prompt_id       TEXT    NOT NULL,
    epoch           INTEGER NOT NULL CHECK (epoch >= 0),
    digest          BLOB    NOT NULL,
    num_generations INTEGER NOT NULL CHECK (num_generations >= 1),
    state           TEXT    NOT NULL CHECK (state IN ('pending', 'generating', 'scoring', 'ready', 'leased',
                                                      'acked', 'stale', 'dropped', 'failed')),
    attempt         INTEGER NOT NULL CHECK (attempt >= 1),
    tries           INTEGER NOT NULL CHECK (tries BETWEEN 1 AND attempt),
    version         INTEGER CHECK (version >= 0),
    rows            TEXT    NOT NULL CHECK (length(rows) = num_generations AND rows NOT GLOB '*[^wfx-]*'),
    payload_bytes   INTEGER NOT NULL CHECK (payload_bytes >= 0),
    reason          TEXT    CHECK (reason IN ('too_few_survivors', 'unscorable', 'zero_variance', 'prompt_too_long',
                                              'reward_cancelled', 'cancelled')),
    error           TEXT,
    engine          TEXT,
    lease_id        TEXT    REFERENCES leases (lease_id),
    acked_by        TEXT    REFERENCES leases (lease_id),
    submitted_at    REAL    NOT NULL,
    changed_at      REAL    NOT NULL,
    UNIQUE (prompt_id, epoch),
    CHECK (CASE WHEN state = 'pending' THEN version IS NULL
                WHEN state IN ('stale', 'dropped', 'failed') THEN 1
                ELSE version IS NOT NULL END),
    CHECK ((state = 'leased') = (lease_id IS NOT NULL)),
    CHECK ((state = 'acked') = (acked_by IS NOT NULL)),
    CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    CHECK (state NOT IN ('scoring', 'ready', 'leased', 'acked') OR instr(rows, 'w') = 0)
) STRICT;

-- What a start loads; small however long the run is.
CREATE INDEX groups_outstanding ON groups (seq)
    WHERE state IN ('pending', 'generating', 'scoring', 'ready', 'leased');
-- A group enters it once, when it ends, so that moves between the other states do not pay for it.
CREATE INDEX groups_ended ON groups (state, seq) WHERE state IN ('acked', 'stale', 'dropped', 'failed');

CREATE TRIGGER groups_attempt_never_falls BEFORE UPDATE OF attempt ON groups WHEN NEW.attempt < OLD.attempt
BEGIN
    SELECT RAISE(ABORT, 'the attempt of a group may not fall');
END;

CREATE TRIGGER groups_end_once BEFORE UPDATE OF state ON groups
    WHEN NEW.state <> OLD.state AND OLD.state IN ('acked', 'stale', 'dropped', 'failed') AND NEW.attempt = OLD.attempt
BEGIN
    SELECT RAISE(ABORT, 'a group that ended goes on in a new attempt only');
END;

CREATE TRIGGER groups_identity_stays BEFORE UPDATE OF seq, prompt_id, epoch, digest, num_generations ON groups
BEGIN
    SELECT RAISE(ABORT, 'the identity of a group may not change');
END;

CREATE TRIGGER groups_stay BEFORE DELETE ON groups
BEGIN
    SELECT RAISE(ABORT, 'a group is never removed');
END;

CREATE TABLE lease_groups (
    lease_id TEXT    NOT NULL REFERENCES leases (lease_id),
    position INTEGER NOT NULL CHECK (position >= 0),
    seq      INTEGER NOT NULL REFERENCES groups (seq),
    attempt  INTEGER NOT NULL CHECK (attempt >= 1),
    PRIMARY KEY (lease_id, position),
    UNIQUE (lease_id, seq)
) STRICT, WITHOUT ROWID;

CREATE TABLE prompts (
    seq     INTEGER PRIMARY KEY REFERENCES groups (seq),
    payload BLOB    NOT NULL
) STRICT;

-- Settled rollouts without their content: narrow rows by key, so that a start reads these and no payload. No foreign
-- key: the fence below asks for more, and groups are never removed.
CREATE TABLE rollouts (
    seq           INTEGER NOT NULL,
    attempt       INTEGER NOT NULL CHECK (attempt >= 1),
    idx           INTEGER NOT NULL CHECK (idx >= 0),
    ok            INTEGER NOT NULL CHECK (ok IN (0, 1)),
    payload_bytes INTEGER NOT NULL CHECK (payload_bytes >= 0),
    payload_id    INTEGER NOT NULL,
    PRIMARY KEY (seq, attempt, idx)
) STRICT, WITHOUT ROWID;

-- Their content by rising id: rollouts of many groups finish at the same time, and are appended to the same few pages
-- instead of each dirtying (and logging) the page of its own group.
CREATE TABLE payloads (
    id      INTEGER PRIMARY KEY,
    payload BLOB    NOT NULL
) STRICT;

CREATE TRIGGER rollouts_fenced BEFORE INSERT ON rollouts
    WHEN NOT EXISTS (SELECT 1 FROM groups WHERE seq = NEW.seq AND attempt = NEW.attempt
                     AND substr(rows, NEW.idx + 1, 1) IN ('w', 'f', 'x'))
BEGIN
    SELECT RAISE(ABORT, 'a rollout that is not of a row of the current attempt');
END;

CREATE TRIGGER rollouts_settle_once BEFORE UPDATE ON rollouts
BEGIN
    SELECT RAISE(ABORT, 'a settled rollout is never rewritten');
END;

CREATE TRIGGER rollouts_take_their_payload AFTER DELETE ON rollouts
BEGIN
    DELETE FROM payloads WHERE id = OLD.payload_id;
END;

CREATE TABLE scores (
    seq     INTEGER NOT NULL,
    attempt INTEGER NOT NULL CHECK (attempt >= 1),
    payload BLOB    NOT NULL,
    PRIMARY KEY (seq, attempt)
) STRICT, WITHOUT ROWID;

CREATE TRIGGER scores_fenced BEFORE INSERT ON scores
    WHEN NOT EXISTS (SELECT 1 FROM groups WHERE seq = NEW.seq AND attempt = NEW.attempt)
BEGIN
    SELECT RAISE(ABORT, 'a score of another attempt than the current one');
END;
