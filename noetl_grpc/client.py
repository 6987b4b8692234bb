"""The typed client: dataclasses out, our errors raised; knows nothing of server, storage or services."""
