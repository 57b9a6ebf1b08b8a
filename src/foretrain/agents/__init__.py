"""Answers language models and other agents: tools with compact answers, over the Model Context Protocol."""
