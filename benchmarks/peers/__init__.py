"""sqlstream beside the systems that users would otherwise pick: same data, same machine, fresh processes, rounds in turn.

    make bench                      # all workloads; ONLY="warm random" runs some
    python -m benchmarks.peers --help

Cases of two kinds: `workloads` has those by what each library brings for the purpose, `as_users` those with transforms and
collate functions that a user writes (`users`), counted from `iter` to the end of the epoch.

`contenders/` has one file for each system, with one function for each workload that it takes part in: it returns a `Stream` or
a `Lookup`, and measures nothing. `workloads` says what is run, `measures` how it is counted, `runner` is one contender in a
process of its own, `driver` runs rounds in turn, `report` and `plots` show what came out.
"""
