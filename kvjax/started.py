"""The time at which this process began to import kvjax. Sources that change later differ from the imported code."""

import time

TIME = time.time()
