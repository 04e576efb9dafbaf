"""Transport of messages between a live server and its workers."""
