"""What carries a plan out in torch."""
