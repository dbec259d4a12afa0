"""Drop-ins: a script of a peer runs after its imports are changed.

One name a peer: `streaming` (MosaicML Streaming), `webdataset`, `wids` and `paddle` (their Paddle forms).

Promises:
- A drop-in holds the peer's names, signatures and defaults, and translates them. It has no engine of its own: order, cache,
  ledger and states are those of `sqlstream`.
- A parameter has an equal here and is translated; or has none and changes no sample, then it is accepted; or is refused by an
  error that says what to do. No parameter is dropped silently.
- Where a peer loses or repeats samples, the drop-in does not.
"""
