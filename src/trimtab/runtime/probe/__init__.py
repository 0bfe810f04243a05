"""A plan's stages run on the device itself: what layers keep, and the recompute that fits: see `run.probe`."""
