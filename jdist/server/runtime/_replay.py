"""A replay of a recorded run, without workers and in no time."""

import pathlib

from jdist import signatures
from jdist.server import _messages, _protocol
from jdist.server.gradients import _learner
from jdist.server.runtime import _delivery, _message_record
from jdist.storage import plain_data


@signatures.checked
def replay(
  path: str | pathlib.Path,
  protocol: _protocol.Protocol,
  learner: _learner.ServerLearner,
) -> _delivery.Delivery:
  """Hands recorded messages to a protocol again, each at its recorded time.

  With the same protocol, a learner at the same beginning, and programs that are
  compiled by the same flags for the same machine, the server ends with the same
  bits.

  Args:
    path: path of the recording.
    protocol: the protocol of the recorded run.
    learner: the server's learner at its beginning, or any other that takes the
      same payloads.

  Returns:
    The driver at the end, with the protocol's state and all counts.

  Raises:
    ValueError: when a reply differs from what was sent then.
  """
  delivery: _delivery.Delivery | None = None
  sent: dict[int, str] = {}
  for header, payload in _message_record.read(path):
    if header["kind"] == "begin":
      delivery = _delivery.Delivery(
        protocol, learner, header["names"], header["workers"]
      )
      continue
    assert delivery is not None, "a recording begins with its workers"
    if header["kind"] == "sent":
      if sent.pop(header["task"], None) != header["hash"]:
        raise ValueError(
          f"`path` must be a recording of this protocol and learner: the "
          f"reply of task {header['task']} is another one."
        )
      continue
    kind = _message_record.MESSAGES[header["kind"]]
    message = plain_data.from_plain(header["message"], kind)
    if isinstance(message, _messages.Push) and header["more"] is not None:
      delivery.accept(message, header["more"], payload)
    delivery.deliver(message, header["now_s"])
    for each in delivery.take_sent()[0]:
      sent[each.reply.task] = _message_record.hash_of(each.payload)
  if delivery is None:
    raise ValueError(f"`path` must be a recording, got {path}.")
  return delivery
