// What states and reasons mean, and what a person does about them. One sentence each, in the words of the README.

/** Order in which a group passes them; `mark` tells them apart without colour. */
export const STATES = {
  pending: { mark: "◌", means: "waits for its next attempt" },
  generating: { mark: "◐", means: "rollouts are in flight at the engines" },
  scoring: { mark: "◕", means: "rewards are being computed" },
  ready: { mark: "●", means: "scored; waits for the trainer's lease" },
  leased: { mark: "◆", means: "handed to the trainer; ends by ack, release or expiry" },
  acked: { mark: "✓", means: "the trainer has it" },
  stale: { mark: "◷", means: "too old for the current policy version" },
  dropped: { mark: "⊘", means: "left out, for the reason given" },
  failed: { mark: "✕", means: "every rollout of it failed" },
};
export const OUTSTANDING = ["pending", "generating", "scoring", "ready", "leased"];
export const ENDED = ["acked", "stale", "dropped", "failed"];

const DROPPED = {
  too_few_survivors: "Too few of its rollouts survived to compare them; see why each failed.",
  unscorable: "Too few of its rollouts were scored by any reward. See the reward errors, here or in the log.",
  zero_variance: 'All rewards are equal, and groups.zero_variance = "drop" leaves such groups out.',
  prompt_too_long: "The prompt does not fit the engine's context: shorten it, or raise the engine's max_model_len.",
  reward_cancelled: "A reward function raised a cancellation of its own.",
  cancelled: "An operator cancelled it.",
};

const FAILURES = {
  connection: "The connection to the engine broke.",
  timeout: "The engine took longer than dispatch.request_timeout_s.",
  deadline: "The rollout took longer than dispatch.rollout_timeout_s.",
  server_error: "The engine answered that it has a fault or too much to do.",
  rejected: "The engine refused the request for good.",
  bad_answer: "The engine's answer was no usable completion.",
  aborted: "The engine ended the request, though nobody here asked for it.",
  prompt_too_long: "The prompt does not fit the engine's context.",
  engine_unavailable: "No engine was healthy for dispatch.engine_wait_s.",
  program: "The rollout's program raised, or ended without a generation.",
  environment: "The environment failed or could not be reached.",
  internal: "A fault of the service itself; its log has the traceback.",
};

const WASTED = {
  stale: "of groups that became too old",
  dropped: "of groups that were dropped",
  failed: "of rollouts that failed",
  late: "that arrived after their group had been cancelled",
};

/** A sentence on why a rollout failed, or null. */
export const failure = (reason) => FAILURES[reason] ?? null;

export const wasted = (reason) => WASTED[reason] ?? DROPPED[reason]?.toLowerCase() ?? null;

/** A sentence on how the group (of GET /groups/{id}) stands. */
export function standing(group) {
  const { state, reason } = group;
  if (state === "dropped") return DROPPED[reason] ?? "It was left out.";
  if (state === "stale")
    return "It became too old for the policy before the trainer took it; its tokens were discarded.";
  if (state === "failed") return "Every rollout of it failed; see each one's error.";
  if (state === "pending" && group.attempt > 1) return "It was opened before and waits for another attempt.";
  const text = STATES[state]?.means ?? state;
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}
