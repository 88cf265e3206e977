"""A real vLLM server on CPU cores: its environment, a tiny model for it, and the flags it runs well with."""
