"""The ground floor: everything two rooms need. Imports nothing else of skimp."""
