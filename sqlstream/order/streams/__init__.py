"""Several datasets as one order: whose turn it is, in exact proportions, and which row that stream gives then.

`whole_weights` makes integers of any numbers; `even` spreads turns, `schedules` reorders them, `mixture` changes their weights.
`stream_rows` goes from draws of streams to rows; `continued` is one stream in epochs of another size. `mixed` is the order
where all batches have one size; `step_partition` and `stepped` are steps and order where streams have batches of their own.
"""
