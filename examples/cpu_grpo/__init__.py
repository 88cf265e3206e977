"""GRPO on two CPU cores: a real engine, the service, a torch trainer, and a reward that a tiny model can learn."""
