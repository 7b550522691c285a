"""A step that is decided on the device, so that the host never waits."""
