"""legroom's version, apart from the package's front door: rooms below the API say it, too."""

__version__ = "0.1.0"
