"""The experiments of the course, a file each."""
