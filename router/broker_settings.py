"""What the environment says about brokers, as their adapters want it."""

from router.brokers.activemq_settings import ActiveMqSettings
from router.brokers.nats_settings import NatsSettings
from router.brokers.rabbitmq_settings import RabbitSettings
from router.brokers.sqs_settings import SqsSettings
from router.brokers.worker import BrokerSettings
from router.settings import Settings


def broker_settings(settings: Settings) -> BrokerSettings:
    return BrokerSettings(
        sqs=SqsSettings(
            max_messages=settings.sqs_max_messages,
            wait=settings.sqs_wait,
            endpoint=settings.sqs_endpoint,
            region=settings.aws_region,
        ),
        nats=NatsSettings(
            servers=settings.nats_servers,
            username=settings.nats_username,
            password=settings.nats_password,
            stream=settings.nats_stream,
            consumer=settings.nats_consumer,
        ),
        rabbitmq=RabbitSettings(settings.rabbitmq_url),
        activemq=ActiveMqSettings(
            url=settings.activemq_url,
            username=settings.activemq_username,
            password=settings.activemq_password,
        ),
    )
