# Makes the cluster where the volume is empty, as the stock image does, then becomes the server.
set -eu
if [ ! -s "$PGDATA/PG_VERSION" ]; then
    [ -s "${POSTGRES_PASSWORD_FILE:?}" ]
    # shellcheck disable=SC2086 - several arguments in one variable, as there
    initdb --username="$POSTGRES_USER" --pwfile="$POSTGRES_PASSWORD_FILE" ${POSTGRES_INITDB_ARGS:-}
    echo "host all all all scram-sha-256" >> "$PGDATA/pg_hba.conf"
    pg_ctl start --wait --options="-c listen_addresses=''"
    createdb --username="$POSTGRES_USER" "$POSTGRES_DB"
    pg_ctl stop --wait --mode=fast
fi
exec "$@" -c "listen_addresses=*"
