"""The terminal's view of a run: `top`, `status`, `groups` and `engines`.

What always holds: this room knows the service by its HTTP interface only; what it reads there is text of others, and
none of it reaches the terminal with control characters or as markup; a key is read from the environment or a file,
goes to the configured address only, and is never shown.
"""
