"""A headless Chromium driven over pipes, with nothing but the library."""

from __future__ import annotations

import json
import os
import pathlib
import select
import shutil
import subprocess
import time
from typing import Any

EXECUTABLE = next(
    filter(
        None,
        map(shutil.which, ('chromium', 'chromium-browser', 'google-chrome')),
    ),
    None,
)
_FLAGS = (
    '--headless',
    '--no-sandbox',
    '--disable-gpu',
    '--disable-dev-shm-usage',
    '--remote-debugging-pipe',
    '--window-size=1440,1180',
)
_TIMEOUT_S = 120.0
_KEY_CODES = {
    'ArrowLeft': 37,
    'ArrowUp': 38,
    'ArrowRight': 39,
    'ArrowDown': 40,
    'Home': 36,
    'End': 35,
}


class Browser:
  """One page in a browser of its own; a context manager.

  Attributes:
    requests: addresses that pages asked for.
    errors: what went wrong in scripts, and errors on the console.
  """

  def __init__(self, profile: pathlib.Path):
    read, child_write = os.pipe()
    child_read, write = os.pipe()
    # It reads commands from 3 and writes to 4. Some shells know no descriptor
    # above 9 but by its name.
    fd = '/proc/self/fd'
    command = f'exec "$0" "$@" 3<{fd}/{child_read} 4>{fd}/{child_write}'
    self._process = subprocess.Popen(
        [
            *('sh', '-c', command, EXECUTABLE, *_FLAGS),
            f'--user-data-dir={profile}',
        ],
        pass_fds=(child_read, child_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(child_read)
    os.close(child_write)
    self._read, self._write = read, write
    self._buffer, self._count, self._session = b'', 0, None
    self.requests: list[str] = []
    self.errors: list[str] = []
    target = self._call('Target.createTarget', url='about:blank')['targetId']
    self._session = self._call(
        'Target.attachToTarget', targetId=target, flatten=True
    )['sessionId']
    for domain in ('Page', 'Runtime', 'Network', 'Log'):
      self._call(f'{domain}.enable')

  def __enter__(self) -> Browser:
    return self

  def __exit__(self, *unused_error: object) -> None:
    os.close(self._write)
    os.close(self._read)
    self._process.kill()
    self._process.wait()

  def open(self, address: str) -> None:
    """Goes to a page and waits until its script says that it is ready."""
    self._call('Page.navigate', url='about:blank')
    self._call('Page.navigate', url=address)
    deadline = time.monotonic() + _TIMEOUT_S
    while self.evaluate('document.documentElement?.dataset.ready') != 'yes':
      assert time.monotonic() < deadline, f'not ready; {self.errors}'
      time.sleep(0.1)

  def evaluate(self, expression: str) -> Any:
    """The value of an expression of JavaScript, as JSON has it."""
    found = self._call(
        'Runtime.evaluate', expression=expression, returnByValue=True
    )
    assert 'exceptionDetails' not in found, found
    return found['result'].get('value')

  def press(self, key: str) -> None:
    """Presses a key, by its name in `KeyboardEvent.key`."""
    text = {'text': key} if len(key) == 1 else {}
    code = {'windowsVirtualKeyCode': _KEY_CODES.get(key, 0)}
    for kind in ('keyDown', 'keyUp'):
      self._call('Input.dispatchKeyEvent', type=kind, key=key, **text, **code)
      text = {}

  def _call(self, method: str, **params: Any) -> dict[str, Any]:
    self._count += 1
    message = {'id': self._count, 'method': method, 'params': params}
    if self._session:
      message['sessionId'] = self._session
    os.write(self._write, json.dumps(message).encode() + b'\0')
    while True:
      reply = self._receive()
      if reply.get('id') == self._count:
        assert 'error' not in reply, reply
        return reply['result']
      self._note(reply)

  def _receive(self) -> dict[str, Any]:
    while b'\0' not in self._buffer:
      ready, _, _ = select.select([self._read], [], [], _TIMEOUT_S)
      more = os.read(self._read, 1 << 16) if ready else b''
      assert more, 'the browser does not answer'
      self._buffer += more
    reply, self._buffer = self._buffer.split(b'\0', 1)
    return json.loads(reply)

  def _note(self, event: dict[str, Any]) -> None:
    params = event.get('params', {})
    match event.get('method'):
      case 'Network.requestWillBeSent':
        self.requests.append(params['request']['url'])
      case 'Runtime.exceptionThrown':
        self.errors.append(str(params['exceptionDetails']))
      case 'Log.entryAdded' if params['entry']['level'] == 'error':
        self.errors.append(params['entry']['text'])
