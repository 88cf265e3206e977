"""GRPO on two CPU cores with a tool: a tiny policy that knows how to call a calculator learns that it pays to."""
