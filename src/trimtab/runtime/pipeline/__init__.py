"""Stages of a vision-language model on torch.distributed.pipelining, cut as a plan says: see `build_pipeline`."""
