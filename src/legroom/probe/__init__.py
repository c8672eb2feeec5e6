"""What this machine's own card answers when it is asked: measured in a minute, kept for later plans."""
