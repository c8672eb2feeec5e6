"""Settings for every test."""

import signal

from hypothesis import settings

# A busy machine must not fail a property: examples are not timed.
settings.register_profile("legroom", deadline=None)
settings.load_profile("legroom")

# A shell starts background jobs with Ctrl-C ignored, nohup with SIGHUP; programs that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
