"""The memory of a training step, by kind and dtype: estimated before a run, measured in one."""
