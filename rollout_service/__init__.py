"""The service between rollouts and training: group life, staleness, cancellation, delivery."""

__version__ = "0.1.0"
