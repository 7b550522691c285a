"""The precision library: it builds on torch alone and knows nothing of halfstep's trainer."""
