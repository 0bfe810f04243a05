"""What a training run reads: the order of a plan, records, packs of tensors, exactness of packing."""
