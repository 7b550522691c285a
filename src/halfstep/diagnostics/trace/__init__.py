"""What really ran: operations, dtypes and calls of a training step, and what is stored."""
