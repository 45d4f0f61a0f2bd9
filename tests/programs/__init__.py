"""Programs that tests run on several paths: locally, eagerly in workers, deferred, pipelined."""
