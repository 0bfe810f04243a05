"""Recompute and offload of the layers that a plan names."""
