"""A deterministic world in which whole routers run, break and start again.

One seed decides what is published, what goes wrong and when, and how long everything takes. Real
code: the engine, the broker adapters, publishing, replays, the SQLite queue and the dead-letter
store. Models: the broker servers behind the adapters' links, and the targets.

The event loop is our own: simloom and seedloop need Python 3.12 and simulate sockets, while here
all code meets the world through ports; what we need beyond `tests.support.virtual_time` are
processes that can be killed and paused, which takes a hundred lines.
"""
