#!/bin/bash
# The queues of the sample configuration. LocalStack runs this once it is up; a queue that is there
# already stays as it is.
set -euo pipefail

awslocal sqs create-queue --queue-name orders.fifo --attributes FifoQueue=true,VisibilityTimeout=30
awslocal sqs create-queue --queue-name mail --attributes VisibilityTimeout=30
