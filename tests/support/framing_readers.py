"""Readers of HTTP framings to compare with: h11, and node's server where there is a node."""

from __future__ import annotations

import base64
import json
import subprocess
from collections.abc import Sequence

import h11

_NODE = r"""
const http = require('http'), net = require('net');
const rows = JSON.parse(require('fs').readFileSync(0)).map(row => Buffer.from(row, 'base64'));
const verdict = data => new Promise(done => {
  let told = 'waits', first = true;
  const server = http.createServer((request, response) => {
    let size = 0;
    const mine = first;
    first = false;
    request.on('data', piece => { size += piece.length; });
    request.on('end', () => { if (mine) told = String(size); response.end(); });
  });
  server.on('connect', (_request, socket) => { told = 'refused'; socket.destroy(); });
  server.on('clientError', (_error, socket) => { if (told === 'waits') told = 'refused'; socket.destroy(); });
  server.listen(0, '127.0.0.1', () => {
    const socket = net.connect(server.address().port, '127.0.0.1');
    socket.on('error', () => {});
    socket.write(data);
    let timer;
    const end = () => {
      clearTimeout(timer);
      socket.destroy();
      server.closeAllConnections();
      server.close(() => done(told));
    };
    socket.on('data', data => { if (!String(data).startsWith('HTTP/1.1 100')) end(); });
    socket.on('close', end);
    timer = setTimeout(end, 400);
  });
});
Promise.all(rows.map(verdict)).then(found => console.log(JSON.stringify(found)));
"""


def by_h11(data: bytes) -> str:
    """Bytes of the first request's body, `refused`, or `waits`."""
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(data)
    size = 0
    while True:
        try:
            event = connection.next_event()
        except h11.RemoteProtocolError:
            return "refused"
        if event is h11.NEED_DATA:
            return "waits"
        if isinstance(event, h11.Data):
            size += len(event.data)
        if isinstance(event, h11.EndOfMessage):
            return str(size)


def by_node(framings: Sequence[bytes]) -> list[str]:
    """The same for each, by the program `node`."""
    given = json.dumps([base64.b64encode(data).decode() for data in framings])
    ended = subprocess.run(["node", "-e", _NODE], input=given, capture_output=True, text=True, check=True)
    found: list[str] = json.loads(ended.stdout)
    return found
