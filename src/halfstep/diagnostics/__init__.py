"""Read-only eyes: what training did to every number, told without changing a bit of it."""
