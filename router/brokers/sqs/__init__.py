"""Amazon SQS: standard and FIFO queues, or those of a server that speaks its JSON protocol."""
