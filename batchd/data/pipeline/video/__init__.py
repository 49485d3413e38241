"""The step that decodes videos."""
