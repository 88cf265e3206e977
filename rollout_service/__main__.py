"""`python -m rollout_service`."""

from rollout_service.cli import main

if __name__ == "__main__":
    main()
