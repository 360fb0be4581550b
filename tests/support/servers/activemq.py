"""ActiveMQ Classic as Debian packages it: one broker with a STOMP connector and nothing else."""

from pathlib import Path
from typing import Final

from tests.support.servers.base import ServerProcess, free_port, missing, needed

HOME: Final = Path("/usr/share/activemq")

_USERS: Final = """\
<plugins><simpleAuthenticationPlugin><users>
  <authenticationUser username="{user}" password="{password}" groups="all"/>
</users></simpleAuthenticationPlugin></plugins>
"""
_CONFIG: Final = """\
<beans xmlns="http://www.springframework.org/schema/beans"
       xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"
       xsi:schemaLocation="
         http://www.springframework.org/schema/beans
         http://www.springframework.org/schema/beans/spring-beans.xsd
         http://activemq.apache.org/schema/core
         http://activemq.apache.org/schema/core/activemq-core.xsd">
  <broker xmlns="http://activemq.apache.org/schema/core" brokerName="test" persistent="true"
          useJmx="false" advisorySupport="false" dataDirectory="{directory}/data"
          schedulerSupport="{scheduler}">
    <persistenceAdapter>
      <kahaDB directory="{directory}/data/kahadb" journalMaxFileLength="8mb"
              preallocationStrategy="sparse_file" enableJournalDiskSyncs="false"/>
    </persistenceAdapter>
    {users}
    <systemUsage><systemUsage>
      <memoryUsage><memoryUsage limit="64 mb"/></memoryUsage>
      <storeUsage><storeUsage limit="1 gb"/></storeUsage>
      <tempUsage><tempUsage limit="256 mb"/></tempUsage>
      <jobSchedulerUsage><jobSchedulerUsage limit="256 mb"/></jobSchedulerUsage>
    </systemUsage></systemUsage>
    <transportConnectors>
      <transportConnector name="stomp" uri="stomp://127.0.0.1:{port}"/>
    </transportConnectors>
  </broker>
</beans>
"""
_LOGGING: Final = """\
log4j.rootLogger=INFO, out
log4j.appender.out=org.apache.log4j.ConsoleAppender
log4j.appender.out.layout=org.apache.log4j.PatternLayout
log4j.appender.out.layout.ConversionPattern=%d %-5p %c{1} - %m%n
"""
# A small machine that lives shortly: it should start fast rather than run fast.
_MACHINE: Final = (
    "-Xms64m",
    "-Xmx256m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
)


class ActiveMqServer(ServerProcess):
    """`user`: the only one that may log in, and the password; None: everyone may."""

    def __init__(
        self, directory: Path, *, scheduler: bool = True, user: tuple[str, str] | None = None
    ) -> None:
        jar = HOME / "bin" / "activemq.jar"
        if not jar.exists():
            missing("activemq")
        port = free_port()
        users = "" if user is None else _USERS.format(user=user[0], password=user[1])
        config = directory / "activemq.xml"
        config.write_text(
            _CONFIG.format(
                directory=directory, port=port, users=users, scheduler=str(scheduler).lower()
            )
        )
        (directory / "log4j.properties").write_text(_LOGGING)
        places = {
            "java.io.tmpdir": directory,
            "activemq.home": HOME,
            "activemq.base": directory,
            "activemq.conf": directory,
            "activemq.data": directory / "data",
            "activemq.classpath": directory,
            "log4j.configuration": (directory / "log4j.properties").as_uri(),
        }
        defined = [f"-D{name}={place}" for name, place in places.items()]
        command = [needed("java"), *_MACHINE, *defined, "-jar", str(jar)]
        super().__init__([*command, "start", f"xbean:{config.as_uri()}"], port, directory)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"activemq://{self.address}"

    def log(self) -> str:
        return (self.directory / "server.log").read_text(errors="replace")
