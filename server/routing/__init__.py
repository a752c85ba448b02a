"""Which replica a prompt goes to."""
