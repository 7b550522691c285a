"""What is wrong, or could be better, with a machine or a run: ``halfstep doctor``."""
