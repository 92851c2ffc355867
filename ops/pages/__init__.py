"""The attention half: regions -> page ids -> attention."""
