"""Engines: how one is started, watched and read."""
