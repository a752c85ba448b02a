"""A simulated vLLM engine: its prefix cache and scheduler block for block, its API, events and metrics; time from a profile.

`blocks`, `cache`, `request` and `scheduler` are pure: no clock, no asyncio. `engine` steps them in real time.
"""
