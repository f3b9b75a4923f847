"""The documents that cross the door, each once: requests of clients, and their answers.

A document is a struct of msgspec. Its fields have their types, limits and descriptions here and
nowhere else: the server decodes requests with the struct, the OpenAPI document is made of it, and
nothing else repeats a limit. The name of a struct is that of its component in OpenAPI, so it is a
contract: generated clients have classes of that name.

In reading order:

fields         types that several documents have: durations with limits, names, times
reading        from bytes to a struct, or everything that is wrong, each with a pointer
subscriptions  one struct for each type of subscription, and the form that clients see
messages       publish, cancel, move; events and heartbeats
schedules      messages that are published again and again
sources        topics whose records are published
pulls          requests of consumers, and their answers
bulk           imports, archives, backups
operations     health, counters, tokens, and where the shards are

- **Where there are kinds, there is a tagged union.** A subscription of type `redis` has the fields
  of `RedisSubscription`, so no code asks whether a field belongs to a type. Clients see one flat
  form with all fields (`SubscriptionModel`): generators make one class of it, and it may hold null
  for the fields of other types. It is derived from the union.
- **A limit stands in the type**, as `msgspec.Meta`. A duration is a type of its own with its limits
  (`fields.Ms`), since JSON has it as a number or as text.
- **The hot calls check some limits themselves** (the subject of a message is looked up among those
  that are known before it is matched against a pattern). Their fields carry such limits as a
  description only (`extra_json_schema`).
- **A good document is decoded once.** Only one that was refused is looked at field by field.

- **An answer has its fields once for both sides.** The server writes times as text, byte for byte,
  and a Python program wants a datetime. So the fields stand in a generic struct
  (`BackupFields[When]`), from which the server's document (`BackupDocument`) and the value of the
  client library (`delayserver.client.Backup`) are derived.

Rejected: pydantic, which names all errors by itself, because each form would stand beside the
struct that the hot path decodes.

It knows nothing but msgspec, and how times and errors are written. Cost: of a decoder of msgspec.
Threads: values.
"""
