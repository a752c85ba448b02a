"""What the gateway costs on top of the engine: CPU and time to first token, beside nginx in the same run.

`python -m bench` runs on Linux with two or more cores. The load (wrk, and our own SSE client) and an upstream that
answers at once share one core; the target's whole process tree has another to itself. Nothing here is imported by kvgate.
"""
