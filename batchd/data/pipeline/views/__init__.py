"""The step that makes several views of one image."""
