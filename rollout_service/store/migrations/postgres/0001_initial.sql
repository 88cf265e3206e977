-- works with: 1
-- The schema refuses what the life of a group does not allow: a row that breaks a rule of the core cannot be committed.
-- Letters of groups.rows: w waiting or in flight, f finished, x failed, - used up by an earlier attempt. Times are Unix
-- seconds of this server's clock. Tables stand in the connection's default schema; one run a schema.

-- One row that every transaction reads and few write: room in its page, so that a change stays in it (HOT).
CREATE TABLE run (
    id                  integer PRIMARY KEY CHECK (id = 1),
    policy_version      bigint  NOT NULL DEFAULT 0 CHECK (policy_version >= 0),
    paused              boolean NOT NULL DEFAULT false,
    final               boolean NOT NULL DEFAULT false,
    last_seq            bigint  NOT NULL DEFAULT 0 CHECK (last_seq >= 0),
    read_position       bigint  NOT NULL DEFAULT 0 CHECK (read_position >= 0),
    prompts_fingerprint text    NOT NULL DEFAULT '',
    revision            bigint  NOT NULL DEFAULT 0 CHECK (revision >= 0),
    taken               bigint  NOT NULL DEFAULT 0 CHECK (taken >= 0),
    returns             bigint  NOT NULL DEFAULT 0 CHECK (returns >= 0),
    halt                text,
    streak_failed       bigint  NOT NULL DEFAULT 0 CHECK (streak_failed >= 0),
    streak_unproductive bigint  NOT NULL DEFAULT 0 CHECK (streak_unproductive >= 0),
    pace_relaxed        bigint
) WITH (fillfactor = 10);

INSERT INTO run (id) VALUES (1);

-- Ends are numbered over the whole run; a number whose transaction failed is a gap.
CREATE SEQUENCE group_ends AS bigint CACHE 1;

CREATE TABLE replicas (
    replica_id       text             PRIMARY KEY,
    name             text             NOT NULL,
    service          text             NOT NULL,
    rules            text             NOT NULL,
    prompts          text             NOT NULL,
    slots            bigint           NOT NULL CHECK (slots >= 0),
    in_flight        bigint           NOT NULL CHECK (in_flight >= 0),
    engines          bigint           NOT NULL CHECK (engines >= 0),
    healthy_engines  bigint           NOT NULL CHECK (healthy_engines >= 0),
    enforced         bigint           NOT NULL CHECK (enforced >= 0),
    stale_groups     bigint           NOT NULL CHECK (stale_groups >= 0),
    aborted_rollouts bigint           NOT NULL CHECK (aborted_rollouts >= 0),
    started_at       double precision NOT NULL,
    seen_at          double precision NOT NULL,
    expires_at       double precision NOT NULL
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- The last batch of each replica that was committed. Not in `replicas`: a heartbeat must not wait for a batch.
CREATE TABLE batches (
    replica_id text   PRIMARY KEY,
    number     bigint NOT NULL
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- What operators asked for at engines, through the API of any replica: the last of each engine. One that is removed, and
-- that nothing names any more, is forgotten.
CREATE TABLE engines (
    engine_id    text             PRIMARY KEY,
    url          text             NOT NULL,
    number       bigint           NOT NULL GENERATED ALWAYS AS IDENTITY UNIQUE,
    wanted       boolean          NOT NULL,
    max_inflight text,
    drain_s      double precision NOT NULL CHECK (drain_s >= 0),
    asked_at     double precision NOT NULL
);

-- Leases are never removed: a request_id is remembered for ever, and a late ack finds its lease.
CREATE TABLE leases (
    lease_id       text             PRIMARY KEY,
    request_id     text             UNIQUE,
    consumer       text,
    max_groups     bigint           NOT NULL CHECK (max_groups >= 1),
    min_groups     bigint           NOT NULL CHECK (min_groups BETWEEN 0 AND max_groups),
    lease_s        bigint           NOT NULL CHECK (lease_s >= 1),
    policy_version bigint           NOT NULL CHECK (policy_version >= 0),
    created_at     double precision NOT NULL,
    expires_at     double precision NOT NULL,
    state          text             NOT NULL CHECK (state IN ('live', 'ended', 'void'))
);

CREATE INDEX leases_live ON leases (created_at, lease_id) WHERE state = 'live';
CREATE INDEX leases_by_version ON leases (policy_version);

-- A group is updated about five times in its life, always with a change of state, and then leaves the indexes of the old
-- one: what is outstanding is small beside all that ever was, so vacuum must come by the number of changes and not by
-- their share of a table that grows for weeks, and must not rest between pages.
CREATE TABLE groups (
    seq             bigint           PRIMARY KEY CHECK (seq > 0),
    prompt_id       text             NOT NULL,
    epoch           bigint           NOT NULL CHECK (epoch >= 0),
    digest          bytea            NOT NULL,
    num_generations bigint           NOT NULL CHECK (num_generations >= 1),
    prompt_bytes    bigint           NOT NULL CHECK (prompt_bytes >= 0),
    state           text             NOT NULL CHECK (state IN ('pending', 'generating', 'scoring', 'ready', 'leased',
                                                               'acked', 'stale', 'dropped', 'failed')),
    attempt         bigint           NOT NULL CHECK (attempt >= 1),
    tries           bigint           NOT NULL CHECK (tries BETWEEN 1 AND attempt),
    version         bigint           CHECK (version >= 0),
    rows            text             NOT NULL CHECK (length(rows) = num_generations AND rows !~ '[^wfx-]'),
    payload_bytes   bigint           NOT NULL CHECK (payload_bytes >= 0),
    reason          text             CHECK (reason IN ('too_few_survivors', 'unscorable', 'zero_variance',
                                                       'prompt_too_long', 'reward_cancelled', 'cancelled')),
    error           text,
    engine          text,
    lease_id        text             REFERENCES leases (lease_id),
    acked_by        text             REFERENCES leases (lease_id),
    end_number      bigint           CHECK (end_number >= 1),
    owner           text,
    claim           bigint           NOT NULL DEFAULT 0 CHECK (claim >= 0),
    outstanding     boolean          NOT NULL GENERATED ALWAYS AS
                                     (state IN ('pending', 'generating', 'scoring', 'ready', 'leased')) STORED,
    submitted_at    double precision NOT NULL,
    changed_at      double precision NOT NULL,
    UNIQUE (prompt_id, epoch),
    CHECK (CASE WHEN state = 'pending' THEN version IS NULL
                WHEN state IN ('stale', 'dropped', 'failed') THEN true
                ELSE version IS NOT NULL END),
    CHECK ((state = 'leased') = (lease_id IS NOT NULL)),
    CHECK ((state = 'acked') = (acked_by IS NOT NULL)),
    CHECK ((state = 'dropped') = (reason IS NOT NULL)),
    CHECK (state NOT IN ('scoring', 'ready', 'leased', 'acked') OR position('w' IN rows) = 0),
    CHECK (end_number IS NULL OR state IN ('acked', 'stale', 'dropped', 'failed')),
    CHECK (owner IS NULL OR state IN ('generating', 'scoring'))
) WITH (fillfactor = 80, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_scale_factor = 0, autovacuum_analyze_threshold = 10000);

-- What a start loads; small however long the run is. By a column of its own, and not by states: a condition on one state
-- would imply it, and a plan made while nothing was outstanding would find ready groups here, among all the others.
CREATE INDEX groups_outstanding ON groups (seq) WHERE outstanding;
-- What a replica may claim: pending groups in the order they are claimed in, and opened ones nobody works on.
CREATE INDEX groups_pending ON groups ((attempt = 1), seq) WHERE state = 'pending';
CREATE INDEX groups_orphaned ON groups (seq) WHERE state IN ('generating', 'scoring') AND owner IS NULL;
CREATE INDEX groups_owned ON groups (owner, seq) WHERE owner IS NOT NULL;
-- What a lease takes, in the order it is leased in.
CREATE INDEX groups_ready ON groups (version, seq) WHERE state = 'ready';
-- A group enters these once, when it ends, so that moves between the other states do not pay for them.
CREATE INDEX groups_ended ON groups (state, seq) WHERE state IN ('acked', 'stale', 'dropped', 'failed');
CREATE UNIQUE INDEX groups_by_end ON groups (end_number) WHERE end_number IS NOT NULL;

CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation', MESSAGE = TG_ARGV[0];
END
$$;

CREATE TRIGGER groups_attempt_never_falls BEFORE UPDATE ON groups FOR EACH ROW WHEN (NEW.attempt < OLD.attempt)
    EXECUTE FUNCTION refuse('the attempt of a group may not fall');

CREATE TRIGGER groups_claim_never_falls BEFORE UPDATE ON groups FOR EACH ROW WHEN (NEW.claim < OLD.claim)
    EXECUTE FUNCTION refuse('the claim of a group may not fall');

CREATE TRIGGER groups_end_once BEFORE UPDATE ON groups FOR EACH ROW
    WHEN (NEW.state <> OLD.state AND OLD.state IN ('acked', 'stale', 'dropped', 'failed') AND NEW.attempt = OLD.attempt)
    EXECUTE FUNCTION refuse('a group that ended goes on in a new attempt only');

CREATE TRIGGER groups_identity_stays BEFORE UPDATE ON groups FOR EACH ROW
    WHEN (NEW.seq <> OLD.seq OR NEW.prompt_id <> OLD.prompt_id OR NEW.epoch <> OLD.epoch OR NEW.digest <> OLD.digest
          OR NEW.num_generations <> OLD.num_generations OR NEW.prompt_bytes <> OLD.prompt_bytes)
    EXECUTE FUNCTION refuse('the identity of a group may not change');

CREATE TRIGGER groups_stay BEFORE DELETE ON groups FOR EACH ROW EXECUTE FUNCTION refuse('a group is never removed');
CREATE TRIGGER groups_stay_all BEFORE TRUNCATE ON groups EXECUTE FUNCTION refuse('a group is never removed');

-- Counters over the whole run: the sum of all rows, each of which may be below zero. A statement that moves groups adds
-- to whichever row no other transaction holds, and to a new one where all are held: so transactions never wait for each
-- other here, and there are as many rows as there ever were writers at the same time.
CREATE TABLE tallies (
    shard        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    pending      bigint NOT NULL DEFAULT 0,
    generating   bigint NOT NULL DEFAULT 0,
    scoring      bigint NOT NULL DEFAULT 0,
    ready        bigint NOT NULL DEFAULT 0,
    leased       bigint NOT NULL DEFAULT 0,
    acked        bigint NOT NULL DEFAULT 0,
    stale        bigint NOT NULL DEFAULT 0,
    dropped      bigint NOT NULL DEFAULT 0,
    failed       bigint NOT NULL DEFAULT 0,
    held_bytes   bigint NOT NULL DEFAULT 0,
    prompt_bytes bigint NOT NULL DEFAULT 0
-- A row changes with every transaction: a page of few rows keeps the versions of each together (HOT).
) WITH (fillfactor = 10, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 500,
        autovacuum_vacuum_cost_delay = 0);

INSERT INTO tallies DEFAULT VALUES;

CREATE FUNCTION tally_groups() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    d      record;
    picked bigint;
BEGIN
    IF TG_OP = 'INSERT' THEN
        SELECT count(*) FILTER (WHERE state = 'pending') AS pending,
            count(*) FILTER (WHERE state = 'generating') AS generating,
            count(*) FILTER (WHERE state = 'scoring') AS scoring,
            count(*) FILTER (WHERE state = 'ready') AS ready,
            count(*) FILTER (WHERE state = 'leased') AS leased,
            count(*) FILTER (WHERE state = 'acked') AS acked,
            count(*) FILTER (WHERE state = 'stale') AS stale,
            count(*) FILTER (WHERE state = 'dropped') AS dropped,
            count(*) FILTER (WHERE state = 'failed') AS failed,
            coalesce(sum(payload_bytes) FILTER (WHERE state IN ('scoring', 'ready')), 0) AS held_bytes,
            coalesce(sum(prompt_bytes) FILTER
                (WHERE state IN ('pending', 'generating', 'scoring', 'ready', 'leased')), 0) AS prompt_bytes
        INTO d FROM after_it;
    ELSE
        SELECT coalesce(sum(n) FILTER (WHERE state = 'pending'), 0) AS pending,
            coalesce(sum(n) FILTER (WHERE state = 'generating'), 0) AS generating,
            coalesce(sum(n) FILTER (WHERE state = 'scoring'), 0) AS scoring,
            coalesce(sum(n) FILTER (WHERE state = 'ready'), 0) AS ready,
            coalesce(sum(n) FILTER (WHERE state = 'leased'), 0) AS leased,
            coalesce(sum(n) FILTER (WHERE state = 'acked'), 0) AS acked,
            coalesce(sum(n) FILTER (WHERE state = 'stale'), 0) AS stale,
            coalesce(sum(n) FILTER (WHERE state = 'dropped'), 0) AS dropped,
            coalesce(sum(n) FILTER (WHERE state = 'failed'), 0) AS failed,
            coalesce(sum(n * payload_bytes) FILTER (WHERE state IN ('scoring', 'ready')), 0) AS held_bytes,
            coalesce(sum(n * prompt_bytes) FILTER
                (WHERE state IN ('pending', 'generating', 'scoring', 'ready', 'leased')), 0) AS prompt_bytes
        INTO d FROM (
            SELECT 1 AS n, state, payload_bytes, prompt_bytes FROM after_it
            UNION ALL
            SELECT -1, state, payload_bytes, prompt_bytes FROM before_it
        ) AS changed;
        IF d.pending = 0 AND d.generating = 0 AND d.scoring = 0 AND d.ready = 0 AND d.leased = 0 AND d.acked = 0
            AND d.stale = 0 AND d.dropped = 0 AND d.failed = 0 AND d.held_bytes = 0 AND d.prompt_bytes = 0 THEN
            RETURN NULL;
        END IF;
    END IF;
    SELECT shard INTO picked FROM tallies LIMIT 1 FOR UPDATE SKIP LOCKED;
    IF picked IS NULL THEN
        INSERT INTO tallies (pending, generating, scoring, ready, leased, acked, stale, dropped, failed, held_bytes,
            prompt_bytes)
        VALUES (d.pending, d.generating, d.scoring, d.ready, d.leased, d.acked, d.stale, d.dropped, d.failed,
            d.held_bytes, d.prompt_bytes);
    ELSE
        UPDATE tallies AS t SET pending = t.pending + d.pending, generating = t.generating + d.generating,
            scoring = t.scoring + d.scoring, ready = t.ready + d.ready, leased = t.leased + d.leased,
            acked = t.acked + d.acked, stale = t.stale + d.stale, dropped = t.dropped + d.dropped,
            failed = t.failed + d.failed, held_bytes = t.held_bytes + d.held_bytes,
            prompt_bytes = t.prompt_bytes + d.prompt_bytes
        WHERE t.shard = picked;
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER groups_tallied_new AFTER INSERT ON groups REFERENCING NEW TABLE AS after_it
    FOR EACH STATEMENT EXECUTE FUNCTION tally_groups();
CREATE TRIGGER groups_tallied_moved AFTER UPDATE ON groups REFERENCING OLD TABLE AS before_it NEW TABLE AS after_it
    FOR EACH STATEMENT EXECUTE FUNCTION tally_groups();

CREATE TABLE lease_groups (
    lease_id text   NOT NULL REFERENCES leases (lease_id),
    position bigint NOT NULL CHECK (position >= 0),
    seq      bigint NOT NULL REFERENCES groups (seq),
    attempt  bigint NOT NULL CHECK (attempt >= 1),
    PRIMARY KEY (lease_id, position),
    UNIQUE (lease_id, seq)
);

-- Payloads are packed already: PostgreSQL does not try to compress them, and keeps long ones out of the row, so that
-- what reads only the narrow columns reads few pages.
CREATE TABLE prompts (
    seq     bigint PRIMARY KEY REFERENCES groups (seq),
    payload bytea  NOT NULL
);

ALTER TABLE prompts ALTER COLUMN payload SET STORAGE EXTERNAL;

-- Settled rollouts. No foreign key: the fence below asks for more, and groups are never removed. Most rows are removed
-- with the end of their group: vacuum gives their room back by the number of removed ones.
CREATE TABLE rollouts (
    seq           bigint  NOT NULL,
    attempt       bigint  NOT NULL CHECK (attempt >= 1),
    idx           bigint  NOT NULL CHECK (idx >= 0),
    ok            boolean NOT NULL,
    payload_bytes bigint  NOT NULL CHECK (payload_bytes >= 0),
    output_tokens bigint  NOT NULL CHECK (output_tokens >= 0),
    payload       bytea   NOT NULL,
    PRIMARY KEY (seq, attempt, idx)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0,
        toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 50000,
        toast.autovacuum_vacuum_cost_delay = 0);

ALTER TABLE rollouts ALTER COLUMN payload SET STORAGE EXTERNAL;

CREATE FUNCTION fence_rollouts() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (
        SELECT 1 FROM added AS a LEFT JOIN groups AS g ON g.seq = a.seq AND g.attempt = a.attempt
        WHERE g.seq IS NULL OR substr(g.rows, (a.idx + 1)::integer, 1) NOT IN ('w', 'f', 'x')
    ) THEN
        RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation',
            MESSAGE = 'a rollout that is not of a row of the current attempt';
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER rollouts_fenced AFTER INSERT ON rollouts REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION fence_rollouts();

CREATE TRIGGER rollouts_settle_once BEFORE UPDATE ON rollouts FOR EACH ROW
    EXECUTE FUNCTION refuse('a settled rollout is never rewritten');

CREATE TABLE scores (
    seq     bigint NOT NULL,
    attempt bigint NOT NULL CHECK (attempt >= 1),
    payload bytea  NOT NULL,
    PRIMARY KEY (seq, attempt)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 10000, autovacuum_vacuum_cost_delay = 0);

ALTER TABLE scores ALTER COLUMN payload SET STORAGE EXTERNAL;

CREATE FUNCTION fence_scores() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT 1 FROM groups WHERE seq = NEW.seq AND attempt = NEW.attempt) THEN
        RAISE EXCEPTION USING ERRCODE = 'integrity_constraint_violation',
            MESSAGE = 'a score of another attempt than the current one';
    END IF;
    RETURN NEW;
END
$$;

CREATE TRIGGER scores_fenced BEFORE INSERT OR UPDATE ON scores FOR EACH ROW EXECUTE FUNCTION fence_scores();

-- Points to go back to: ends are numbered over the whole run, a checkpoint remembers how many there were.
CREATE TABLE checkpoints (
    name           text             PRIMARY KEY,
    number         bigint           NOT NULL UNIQUE CHECK (number >= 1),
    policy_version bigint           NOT NULL CHECK (policy_version >= 0),
    ends           bigint           NOT NULL CHECK (ends >= 0),
    created_at     double precision NOT NULL
);

CREATE TRIGGER checkpoints_stand BEFORE UPDATE ON checkpoints FOR EACH ROW
    EXECUTE FUNCTION refuse('a checkpoint is never moved');
