"""The pair that trains under every engine: a server's learner, a worker's."""
