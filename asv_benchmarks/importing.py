"""What `import kvcache` costs a process."""


class Import:
    """From nothing to a manager class, numpy already there."""

    def timeraw_import(self):
        return "import kvcache.control.cpu", "import numpy"
