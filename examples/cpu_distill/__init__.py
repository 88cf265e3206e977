"""On-policy distillation on two CPU cores."""
