"""Which engines there are: given one by one, listed in a file, or behind a DNS name."""
