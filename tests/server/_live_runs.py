"""Live runs in tests: a session, its records and its end in one call."""

from typing import Any, NamedTuple

from jdist import server


class Result(NamedTuple):
  records: list[Any]
  summary: dict[str, Any]
  payload: Any
  events: list[dict[str, Any]]


def run(engine, make_server, works, total, unit="updates", **options):
  """Runs on an engine that stays; `options` are those of the session, `fit`."""
  own = ("plan", "model", "startup_s", "on_status", "on_event")
  given = {name: options.pop(name) for name in own if name in options}
  plan = given.pop("plan", None) or server.LivePlan(workers=tuple(works))
  session = server.LiveSession(engine, make_server, works, plan, **given)
  records = server.ServerRun(session).fit(total, unit, **options)
  return Result(records, session.summary(), session.payload, session.events)
