"""Runnable examples. They use the service over HTTP only and import nothing of `rollout_service`."""
