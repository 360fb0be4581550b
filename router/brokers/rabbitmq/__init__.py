"""RabbitMQ: classic and quorum queues, consumed with a prefetch window and retry queues."""
