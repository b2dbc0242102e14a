"""Nothing but the path to the cases."""
