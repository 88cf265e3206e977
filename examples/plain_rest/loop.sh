#!/usr/bin/env bash
# A trainer's whole dialogue with rollout-service in curl and jq: no client library, no Python.
# Exit status 0 only if every group it submitted has been acked.
#
#   SERVICE=http://127.0.0.1:8080 ./loop.sh
#
# STEPS (3) training steps of GROUPS_PER_STEP (2) groups each; WAIT_S (30): how long one lease call waits, up to 60.
set -euo pipefail

SERVICE=${SERVICE:-http://127.0.0.1:8080}
STEPS=${STEPS:-3}
GROUPS_PER_STEP=${GROUPS_PER_STEP:-2}
WAIT_S=${WAIT_S:-30}
RUN="run-$(date +%s)-$$" # ids are remembered for ever: each run has its own

answers=$(mktemp -d)
id="" # the lease in hand

# However the script ends, a lease in hand is given back: its groups are ready again at once, not only after lease_s.
leave() {
  if [[ -n $id ]]; then
    curl --silent --max-time 5 --request POST "$SERVICE/leases/$id/release" >&2 || true
  fi
  rm -rf "$answers"
}
trap leave EXIT

fail() {
  echo "$*" >&2
  exit 1
}

# call VERB PATH [BODY]: prints the answer. A refusal is a problem document: its `detail` goes to stderr, status 1.
# Every call here may be repeated, so the retries can cover a restart of the service.
call() {
  local status
  status=$(curl --silent --show-error --max-time 90 --retry 20 --retry-delay 1 --retry-all-errors \
    --request "$1" ${3:+--data "$3"} --output "$answers/last" --write-out '%{http_code}' "$SERVICE$2") || return
  if ((status >= 400)); then
    echo "$1 $2: $status: $(jq --raw-output .detail "$answers/last")" >&2
    return 1
  fi
  cat "$answers/last"
}

# Groups that ended without being delivered, since the service's store began.
lost() {
  call GET /status | jq '.groups | .stale + .dropped + .failed'
}

# submit STEP: the prompts of one step. A prompt_id makes the call repeatable: what is known already is not submitted
# twice. Every further field of `columns` goes to the rewards.
submit() {
  local body group
  body=$(jq --null-input --compact-output --arg run "$RUN" --argjson step "$1" --argjson count "$GROUPS_PER_STEP" '{
    prompts: [range($count) | {prompt_id: "\($run)-\($step)-\(.)", prompt: "Question \($step): ", columns: {step: $step}}]
  }')
  call POST /prompts "$body" | jq --raw-output '.groups[].group_id' >"$answers/submitted"
  while read -r group; do mine+=("$group"); done <"$answers/submitted"
  echo "submitted $(jq --raw-input --null-input --raw-output '[inputs] | join(", ")' "$answers/submitted")"
}

# lease STEP: waits until a step's groups are scored; the answer is in $answers/lease. Asked again with the same
# request_id, the service gives the same groups.
lease() {
  local body lost_now
  body=$(jq --null-input --compact-output --arg id "$RUN-$1" --argjson groups "$GROUPS_PER_STEP" --argjson wait "$WAIT_S" \
    '{max_groups: $groups, min_groups: $groups, wait_s: $wait, lease_s: 600, consumer: "loop.sh", request_id: $id}')
  while true; do
    call POST /leases "$body" >"$answers/lease"
    if [[ $(jq --raw-output .status "$answers/lease") == ok ]]; then
      return
    fi
    # "empty": not yet. "exhausted": never; only after a POST /prompts with "final": true, which is not sent here.
    lost_now=$(lost)
    if ((lost_now > lost_before)); then
      fail "groups were lost (stale, dropped or failed): look at $SERVICE/groups?state=stale,dropped,failed"
    fi
  done
}

# Where does the run stand?
version=$(call GET /policy_version | jq .version)
outstanding=$(call GET /status | jq .outstanding)
((outstanding == 0)) || fail "$outstanding groups of an earlier run are outstanding: this example wants a service of its own"
lost_before=$(lost)
mine=() # the groups submitted here
echo "policy version $version"

submit 1
for ((step = 1; step <= STEPS; step++)); do
  if ((step < STEPS)); then
    submit $((step + 1)) # generated while this step trains
  fi
  lease "$step"
  id=$(jq --raw-output .lease_id "$answers/lease")

  # Look, where a trainer would train: completion_mask is 1 on the tokens to train, old_log_probs are the engine's.
  jq --raw-output '.groups[] |
    "  \(.group_id): version \(.policy_version), staleness \(.staleness), mean reward \(.reward_mean), " +
    "\([.samples[].completion_mask | add] | add) tokens to train"' "$answers/lease"
  jq --exit-status '[.groups[].samples[] | (.input_ids | length) as $tokens
    | (.completion_mask | length) == $tokens and (.old_log_probs | length) == $tokens] | all' "$answers/lease" \
    >/dev/null || fail "a sample's arrays differ in length"

  # More time, in a step that may take longer than lease_s.
  call POST "/leases/$id/renew" '{}' >/dev/null

  # Ack: these groups are trained and never delivered again.
  call POST "/leases/$id/ack" | jq --raw-output '"  acked \(.acked | join(", "))"'
  id=""

  # Bump, after every engine has the new weights. What it makes stale is aborted at once.
  version=$((version + 1))
  call POST /policy_version "{\"version\": $version}" | jq --raw-output --arg step "$step" \
    '"step \($step): policy version \(.version), \(.stale_groups) groups stale, \(.aborted_rollouts) rollouts aborted"'
done

# What the service says about it.
call GET /status | jq --compact-output '{policy_version, submitted, groups, outstanding}'
call GET /metrics | grep -E '^rollout_(policy_version|failed_total|stale_groups_total|generated_tokens_total)'

for group in "${mine[@]}"; do
  state=$(call GET "/groups/$group" | jq --raw-output .state)
  [[ $state == acked ]] || fail "$group is $state, not acked"
done
echo "all ${#mine[@]} groups were acked"
