"""Queues of PGMQ, the message queue extension of PostgreSQL (CMD-7)."""
