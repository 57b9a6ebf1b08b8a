"""Simulates clusters in rounds, in which jobs lease devices of one kind, and the policies of Gavel."""
