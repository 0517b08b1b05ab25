"""Learning tasks: losses."""
