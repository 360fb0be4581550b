"""Which router is at the other end of a connection."""

import os
import socket

from tests.chaos.load import inode_of, owns_socket


def test_a_connection_is_known_by_the_process_that_has_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as client:
            ends = client.getsockname(), client.getpeername()
            accepted, _ = server.accept()
            found, back = inode_of(*ends), inode_of(*reversed(ends))

            assert found == os.fstat(client.fileno()).st_ino
            assert back == os.fstat(accepted.fileno()).st_ino
            assert owns_socket(os.getpid(), found)
            assert not owns_socket(os.getppid(), found)
        assert not owns_socket(os.getpid(), found)
        accepted.close()

        assert inode_of(*ends) == 0
        assert not owns_socket(os.getpid(), 0)
