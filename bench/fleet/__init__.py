"""How well prompts are routed: a public trace on eight simulated engines, behind kvgate's policies and cache-aware peers.

`trace` makes prompts of a trace, `ideal` says what one cache of the whole fleet's size would have hit, `engines` starts the
fleet, `load` sends, `arms` runs one policy at one rate, `judge` and `report` say what came of it.
"""
