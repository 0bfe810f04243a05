"""The decisions of a plan, one by one."""
