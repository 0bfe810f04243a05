"""Recompute of the layers that a plan names."""
