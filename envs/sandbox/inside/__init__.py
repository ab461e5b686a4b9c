"""What runs inside a box: the worker and its children. Standard library only, and nothing of the rest of Toolgym.

These files are copied into the image (`/opt/toolgym`) and loaded there under the same names; see `boot`.
"""
