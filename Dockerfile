# Builds a wheel, then installs it alone into a slim image that runs as a non-root user.
FROM python:3.13-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY noetl_grpc noetl_grpc
COPY generated generated
RUN python -m venv /opt/noetl-grpc \
    && /opt/noetl-grpc/bin/pip install --no-cache-dir '.[otel]'

FROM python:3.13-slim
LABEL org.opencontainers.image.title="noetl-grpc" \
      org.opencontainers.image.description="The gRPC service in front of NoETL's event log" \
      org.opencontainers.image.licenses="Apache-2.0"
COPY --from=build /opt/noetl-grpc /opt/noetl-grpc
ENV PATH=/opt/noetl-grpc/bin:$PATH \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
USER 65532:65532
# gRPC, metrics
EXPOSE 50051 9464
STOPSIGNAL SIGTERM
ENTRYPOINT ["noetl-grpc"]
CMD ["serve"]
