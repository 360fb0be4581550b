"""message-router: one service between message brokers and HTTP endpoints."""

__version__ = "0.1.0"
