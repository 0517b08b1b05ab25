"""Engines run methods. `rounds` is the loop; `eager` trains a cohort one client after another; `distributed` shares
clients out over several processes."""
