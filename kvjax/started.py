"""The time at which this process began to import kvjax. Sources that change later are not those that it runs."""

import time

TIME = time.time()
