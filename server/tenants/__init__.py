"""Who asks, what they may use, and what their prefixes are shared with: keys, limits and cache isolation."""
