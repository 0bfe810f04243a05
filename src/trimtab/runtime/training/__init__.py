"""The training loop of a plan, its checkpoints, ranks and log, and the same inside the Trainer."""
