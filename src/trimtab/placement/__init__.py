"""Where each part of a model lies for inference: machines, bytes of each unit, the placement itself."""
