"""The `pods` command: what it does on the machine where it is typed."""


class MissingPackage(Exception):
    """A command needs a package that is not installed; the text names the extra that has it."""
