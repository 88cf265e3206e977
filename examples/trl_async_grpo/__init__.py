"""TRL's AsyncGRPOTrainer on two CPU cores: a real engine, the service, and a reward that a tiny model can learn."""
