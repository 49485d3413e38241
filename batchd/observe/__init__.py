"""From the daemon's status to what people look at.

diagnosis  the daemon's numbers -> verdicts and the overview; pure, for commands and the observer
columns    the columns of their tables, each declared once
http       the observer process: HTTP, metrics, the page
"""
