"""Several nodes extract into one store: its batches are split into partitions, each a flow run on one of the nodes.

Who writes is decided by the locks of `tasks/store`, never by what a scheduler believes; this package decides what is
started where, and when something is started again.
"""
