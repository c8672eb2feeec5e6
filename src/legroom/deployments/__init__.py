"""Every file or text that a server is started from, read into started servers. Nothing here judges what it reads."""
