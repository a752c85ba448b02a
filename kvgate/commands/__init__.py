"""One module a command: `add_parser(commands)` declares it, `run(args)` does it and returns the exit code."""
