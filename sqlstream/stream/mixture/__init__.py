"""The run of a mixture: weights that change, turns, places of steps, states.

Of samples, or batches of one size: `mixture_run`. Of steps whose streams have batches of their own: `stepped_run`.
"""
