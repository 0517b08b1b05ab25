"""Learning tasks; at present their losses."""
