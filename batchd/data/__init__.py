"""One sample: where it comes from, and what becomes of it.

storage    files of this machine and of object stores, behind one interface; indexes and their cache
samples    columns, values, and checks of what users write about them
media      containers of videos, and their frames
sources    a folder for each kind of source
pipeline   a folder for each family of steps
functions  users' functions: found everywhere without an import, called in workers only
"""
