"""Engines run methods. `rounds` is the loop.

`eager` trains a cohort one client after another, `batched` all of it at once, `compiled` likewise by compiled steps,
`cuda` on a GPU by replayed graphs; `distributed` shares clients out over several processes.
"""
