"""NATS JetStream: each queue is a durable pull consumer of a stream."""
