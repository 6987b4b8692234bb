"""Where protobuf messages and our own values meet, one module per family; for services and client only."""
