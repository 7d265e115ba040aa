"""An answer's head and body leave a connection in one piece."""

import asyncio
import json
import socket
from urllib.parse import urlsplit

from polygon.web.together import Together


class Written:
    """A connection that keeps what is sent."""

    def __init__(self):
        self.sent = []
        self.closed = False

    def write(self, part):
        self.sent.append(part)

    def close(self):
        self.closed = True

    def get_extra_info(self, name):
        return name


def test_what_is_written_in_one_turn_goes_at_its_end():
    """In its order, and nothing of it is sent twice."""

    async def turns():
        own = Written()
        connection = Together(own)
        connection.write(b"head ")
        connection.write(b"body")
        assert not own.sent
        await asyncio.sleep(0)
        connection.write(b"more")
        await asyncio.sleep(0)
        return own.sent

    assert asyncio.run(turns()) == [b"head body", b"more"]


def test_what_is_left_is_sent_before_the_end():
    """And everything else is the connection's own."""

    async def ended():
        own = Written()
        connection = Together(own)
        connection.write(b"last")
        connection.close()
        await asyncio.sleep(0)
        assert connection.get_extra_info("peername") == "peername"
        return own

    own = asyncio.run(ended())
    assert own.sent == [b"last"] and own.closed


def test_a_connection_stays_for_many_answers(server, plan_id):
    """Requests one after another and two at once, each answered whole and in its order."""
    place = urlsplit(server.url)
    body = b'{"bandwidth_factor": 1.5}'
    head = f"POST /api/v1/plans/{plan_id}/view?bound=false HTTP/1.1\r\nHost: {place.netloc}\r\n"
    asked = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
    last = f"GET /api/v1/deployments HTTP/1.1\r\nHost: {place.netloc}\r\nConnection: close\r\n\r\n".encode()
    with socket.create_connection((place.hostname, place.port)) as connection, connection.makefile("rb") as answers:
        steps = []
        for sent in (asked, asked + asked, b""):
            connection.sendall(sent)
            length = 0
            while (line := answers.readline()) != b"\r\n":
                length = int(line.split(b":")[1]) if line.startswith(b"content-length") else length
            steps.append(json.loads(answers.read(length))["estimate"]["step_s"])
        assert len(set(steps)) == 1
        connection.sendall(last)
        assert answers.read().endswith(b"]")
